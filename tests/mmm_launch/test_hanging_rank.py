"""A rank that does not come to a collective, by the program's own timeout: one message, and every process ends."""

import signal
import socket
import subprocess
import sys

import pytest

from mmm_verify.testing import free_port

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from mmm.torch_private.groups import set_timeout
from mmm.runtime.clock import StepClock
from mmm.runtime.hang import HangWatch
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import whoami
rank, cpu, limit = whoami(), torch.device("cpu"), float(sys.argv[2])
clock = StepClock(cpu, ("dtf", "dto"))
def all_batches(step):
    if step == 3 and rank.rank == int(sys.argv[1]):
        time.sleep(1000)
with process_group(rank, cpu, 100), HangWatch(rank, limit, clock):
    for step in range(5):
        if step == 3:  # once all have come to step 2: also on a busy machine, they are at most a moment apart
            set_timeout(timedelta(seconds=limit), dist.group.WORLD)
        clock.start()
        clock.step = step
        all_batches(step)
        clock.lap("dtf")
        dist.all_reduce(torch.ones(4, 3))
        clock.lap("dto")
"""
HOST = socket.gethostname()


def run(launcher, words, *started_by, ranks=3):
    """The program, under launch or with nothing but its variables: output, and the exit codes."""
    launcher.write("t.py", PROGRAM)
    if started_by:
        done = launcher.run("-n", str(ranks), "--device", "cpu", "python3", "t.py", *words)
        return done.stderr, [done.returncode]
    places = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "t.py", *words],
            cwd=launcher.folder,
            env=launcher.environment(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), **places),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [each.communicate(timeout=200)[1] for each in processes]
        return "".join(said), [each.poll() for each in processes]
    finally:
        for each in processes:
            if each.poll() is None:
                each.send_signal(signal.SIGKILL)
                each.communicate()


def test_under_launch(launcher):
    text, codes = run(launcher, ["0", "4"], "launch")
    assert text.startswith(f"hang: rank 0 on {HOST} did not come to all_reduce (number 4 of the world, ranks 0-2, ")
    assert f"  rank 0 ({HOST}): step 3, at " in text
    assert f"  ranks 1-2 ({HOST}): step 3, waiting in all_reduce (number 4 of the world" in text
    assert len(text.splitlines()) == 3
    assert codes == [1]


@pytest.mark.long
def test_without_launch_every_process_ends(launcher):
    text, codes = run(launcher, ["1", "4"], ranks=2)
    assert text.startswith(f"hang: rank 1 on {HOST} did not come to all_reduce (number 4 of the world, ranks 0-1, ")
    assert len(text.splitlines()) == 3
    assert codes == [1, 1]
