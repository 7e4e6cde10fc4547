"""A rank that does not come: the message says which, to which collective, and where every rank is. A rank's own work:
the time of a step without waiting for the others. Rank 1 sleeps in each step."""

import math
import re
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mmm.errors import HangError
from mmm.history import load
from mmm.parallel import Layout, build_mesh
from mmm.run.command_line import configure
from mmm.runtime import hang
from mmm.runtime.clock import OWN, StepClock
from mmm.runtime.waits import timed_waits
from mmm.torch_private.groups import all_reduced, default_store
from mmm.trainer import lm
from mmm_lab.cli.history_ranks import slowest_text
from mmm_lab.cli.main import main as mmm
from support.pool import program_on

HOST = socket.gethostname()
LIMIT = 3.0


def wrapped(function, *args):
    """Errors as a pipeline's stages raise them."""
    try:
        function(*args)
    except RuntimeError as error:
        raise RuntimeError("a stage has failed") from error


def late(rank, kind):
    """Rank 3 does not come to step 7; what each rank raises, and says.

    Args:
        kind: collective, over the axis tp, or receive.
    """
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", LIMIT)
    clock = StepClock(torch.device("cpu"), ("dto",))
    ended = threading.Event()
    messages = []
    tensor = torch.ones(2, 3)
    group = mesh["tp"].get_group()
    watch = hang.HangWatch(rank, LIMIT, clock)
    error = None
    over = patch.multiple(hang, _say=messages.append, os=SimpleNamespace(_exit=lambda code: ended.set()))
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
            # Ranks 0 and 1 do not wait for rank 3.
            ended.wait(0 if rank.rank > 1 else 20)
    except HangError as raised:
        error = raised.code, str(raised)
    return error, messages, ended.is_set()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["collective", "receive"])
def test_the_message(run_on_ranks, kind):
    answers = run_on_ranks(late, 4, kind, timeout=120)
    code, text = answers[2][0]
    first, *lines = text.splitlines()
    waits = r"all_reduce \(call 2 of group tp, ranks 2-3, \(2, 3\) float32\)" if kind == "collective" else "recv"
    assert code == 1
    assert re.fullmatch(rf"hang: ranks? .*3 on {HOST} did not reach {waits} within 3 s \(--timeout\)", first), text
    assert re.fullmatch(
        rf"  rank 2 \({HOST}\): step 7, waiting in {waits}, at .*test_hang.py:\d+ in (late|wrapped)", lines[-1]
    )
    assert any("rank 3" in line and "step 7, at " in line for line in lines), text
    assert [messages for _, messages, _ in answers] == [[], [], [text], []]
    assert [ended for *_, ended in answers] == [True, True, False, True]


def closed_first(rank):
    """Rank 2 does not come. Rank 1 loses its connection before rank 0, which will time out, has asked anybody."""
    # Rank 1's collective must not time out: gloo would then close rank 0's connection before rank 0 times out.
    seconds = 60 if rank.rank == 1 else LIMIT
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=seconds))
    watch = hang.HangWatch(rank, LIMIT, StepClock(torch.device("cpu")))
    ended = threading.Event()
    over = patch.multiple(
        hang,
        _say=lambda text: None,
        os=SimpleNamespace(_exit=lambda code: ended.set()),
        # On a busy machine rank 0 may begin seconds after rank 1.
        ASKED_WITHIN=20.0,
    )
    dist.barrier()
    try:
        with over, watch:
            if rank.rank == 2:
                ended.wait(60)
            elif rank.rank == 1:
                dist.all_reduce(torch.ones(1), group=group, async_op=True)
                time.sleep(0.9 * LIMIT)
                raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
            else:
                dist.all_reduce(torch.ones(1), group=group)
    except (HangError, RuntimeError) as error:
        return type(error).__name__, str(error)


@pytest.mark.long
def test_a_lost_connection_does_not_hide_the_hang(run_on_ranks):
    asks, closed, _ = run_on_ranks(closed_first, 3, timeout=120)
    assert asks == closed
    assert asks[0] == "HangError"
    assert asks[1].startswith(f"hang: rank 2 on {HOST} did not reach all_reduce (call ")
    assert "ranks 0-1" not in asks[1].splitlines()[0]
    assert all("waiting in all_reduce (call " in line for line in asks[1].splitlines()[2:]), asks[1]


def test_a_healthy_run_asks_nobody(run_on_ranks):
    assert run_on_ranks(healthy, 2) == [[True, False]] * 2


def healthy(rank):
    """Whether the store was left alone; whether the thread is there afterwards."""
    clock = StepClock(torch.device("cpu"), ("dto",))
    watch = hang.HangWatch(rank, 100.0, clock)
    watch.pause = 0.01
    with watch:
        for step in range(20):
            clock.start()
            clock.step = step
            dist.all_reduce(torch.ones(1))
            time.sleep(0.02)
            clock.lap("dto")
    return [watch._clone is None, watch._thread.is_alive()]


# s
NAP = 0.3


def steps(rank, kind):
    """dt and own work of the last of three steps."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (3,))
    clock = StepClock(torch.device("cpu"))
    model = torch.nn.Linear(9, 9)
    wait = Work.wait
    sum_up = partial(all_reduced, group=mesh.get_group())
    summed = {"operator": sum_up, "compiled": torch.compile(sum_up)}
    store = default_store()
    with timed_waits(clock):
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        elif kind == "torch ddp":
            model = DistributedDataParallel(model)
        for step in range(3):
            if step:
                clock.read()
            clock.start()
            loss = model(torch.ones(2, 9)).sum()
            clock.lap("dtf")
            # Rank 1's nap begins when the others are about to wait: a busy machine may have them late.
            store.set(f"{kind} {step} {rank.rank}", "")
            if rank.rank == 1:
                store.wait([f"{kind} {step} {other}" for other in range(3)])
                time.sleep(NAP)
            loss.backward()
            if kind == "dtensor":
                distribute_tensor(torch.ones(3), mesh, [Shard(0)]).full_tensor()
            if kind in summed:
                summed[kind](torch.ones(3))
            clock.lap("dto")
        # After the last lap.
        time.sleep(NAP)
    assert Work.wait is wait
    read = clock.read()
    return read["dt"], read[OWN]


@pytest.mark.parametrize("kind", ["fsdp", "dtensor", "operator", pytest.param("compiled", marks=pytest.mark.long)])
def test_own_work_is_the_step_without_waiting(run_on_ranks, kind):
    times = run_on_ranks(steps, 3, kind)
    # all wait for the slowest
    assert all(dt > 0.9 * NAP for dt, _ in times)
    assert times[1][1] >= NAP
    assert all(own < dt - NAP / 2 for dt, own in (times[0], times[2]))


def ticks(rank):
    """Rank 1 comes once another thread of rank 0 has gone on for some time, while rank 0 waits for it."""
    clock = StepClock(torch.device("cpu"))
    store = default_store()
    waits = threading.Event()

    def tick():
        waits.wait()
        for _ in range(9):
            time.sleep(0.01)
        store.set("ticked", "")

    thread = threading.Thread(target=tick)
    with timed_waits(clock):
        dist.barrier()
        clock.start()
        thread.start()
        if rank.rank == 1:
            store.wait(["ticked"], timedelta(seconds=60))
        waits.set()
        all_reduced(torch.ones(3), dist.group.WORLD)
        thread.join()
        clock.end_step()


def test_other_threads_go_on_while_a_rank_waits(run_on_ranks):
    """One of them finds out which rank does not come. A rank that waited with Python's lock would never see rank 1."""
    run_on_ranks(ticks, 2)


def test_own_work_under_pytorchs_ddp_is_not_known(run_on_ranks):
    """It waits in C++."""
    times = run_on_ranks(steps, 3, "torch ddp")
    for dt, own in times:
        assert dt > 0.9 * NAP
        assert math.isnan(own)


def train(rank, outdir, flags):
    step = torch.optim.SGD.step

    def slow_step(*args, **named):
        time.sleep(2 * NAP if rank.rank == 1 else 0)
        return step(*args, **named)

    sizes = {
        "preset": "debug",
        "seq_length": 16,
        "global_batch_size": 3,
        "max_iters": 3,
        "optimizer": "sgd",
        "own_work": True,
    }
    with program_on(rank), patch.object(torch.optim.SGD, "step", slow_step):
        lm.train(configure(lm.Config, **sizes, **flags, device="cpu", plots=False, outdir=outdir))


def test_the_slow_rank_of_a_run_is_named(run_on_ranks, tmp_path, capsys):
    run_on_ranks(train, 3, tmp_path, {"parallel": "fsdp"})
    record = load(tmp_path)
    assert record["dt_own"].dims == ("draw", "rank")
    assert slowest_text(record).startswith("rank 1 (")
    assert mmm(["history", str(tmp_path), "--ranks"]) == 0
    table, _, sentence = capsys.readouterr().out.rpartition("\n\n")
    assert sentence.startswith("slowest: rank 1 (host ")
    # Own seconds of rank 1.
    assert float(table.splitlines()[-2].split()[-3]) > NAP
