"""A rank that does not come: the message says which, to which collective, and where every rank is."""

import re
import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mmm.errors import HangError
from mmm.parallel import Layout, build_mesh
from mmm.runtime import hang
from mmm.runtime.clock import StepClock

HOST = socket.gethostname()
LIMIT = 3.0


def wrapped(function, *given):
    """Errors as a pipeline's stages raise them."""
    try:
        function(*given)
    except RuntimeError as error:
        raise RuntimeError("a stage has failed") from error


def late(rank, kind):
    """Rank 3 does not come to step 7; what each rank raises, and says.

    Args:
        kind: collective, over the axis tp, or receive.
    """
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", LIMIT)
    clock, ended, said = StepClock(torch.device("cpu"), ("dto",)), threading.Event(), []
    tensor, group = torch.ones(2, 3), mesh["tp"].get_group()
    watch = hang.HangWatch(rank, LIMIT, clock)
    error = None
    over = patch.multiple(hang, _say=said.append, os=SimpleNamespace(_exit=lambda code: ended.set()))
    try:
        with over, watch:
            for step in (6, 7):
                clock.start()
                clock.step = step
                if rank.rank == 3 and step == 7:
                    ended.wait(60)
                    break
                if kind == "collective":
                    dist.all_reduce(tensor, group=group)
                elif rank.rank == 2:
                    wrapped(dist.recv, tensor, 3, group)
                elif rank.rank == 3:
                    dist.send(tensor, 2, group=group)
                clock.lap("dto")
            ended.wait(0 if rank.rank > 1 else 20)  # ranks 0 and 1 do not wait for rank 3
    except HangError as raised:
        error = raised.code, str(raised)
    return error, said, ended.is_set()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["collective", "receive"])
def test_the_message(run_on_ranks, kind):
    answers = run_on_ranks(late, 4, kind, timeout=120)
    code, text = answers[2][0]
    first, *lines = text.splitlines()
    waits = r"all_reduce \(number 2 of tp, ranks 2-3, \(2, 3\) Float\)" if kind == "collective" else "recv"
    assert code == 1
    assert re.fullmatch(rf"hang: ranks? .*3 on {HOST} did not come to {waits} within 3 s \(--timeout\)", first), text
    assert re.fullmatch(
        rf"  rank 2 \({HOST}\): step 7, waiting in {waits}, at .*test_hang.py:\d+ in (late|wrapped)", lines[-1]
    )
    assert any("rank 3" in line and "step 7, at " in line for line in lines), text
    assert [said for _, said, _ in answers] == [[], [], [text], []]
    assert [ended for *_, ended in answers] == [True, True, False, True]


def test_a_healthy_run_asks_nobody(run_on_ranks):
    assert run_on_ranks(healthy, 2) == [[True, False]] * 2


def healthy(rank):
    """Whether the store was left alone; whether the thread is there afterwards."""
    clock = StepClock(torch.device("cpu"), ("dto",))
    watch = hang.HangWatch(rank, 4.0, clock)
    watch.pause = 0.01
    with watch:
        for step in range(20):
            clock.start()
            clock.step = step
            dist.all_reduce(torch.ones(1))
            time.sleep(0.02)
            clock.lap("dto")
    return [watch._clone is None, watch._thread.is_alive()]
