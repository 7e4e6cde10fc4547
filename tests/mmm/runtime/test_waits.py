"""A rank's own work: the time of a step without waiting for the others. Rank 1 sleeps in each step."""

import time
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mmm.history import load
from mmm.run.command_line import configure
from mmm.runtime.clock import OWN, StepClock, timed_waits
from mmm.trainer import lm
from mmm_lab.cli.history import straggler
from mmm_lab.cli.main import main as mmm
from support.pool import program_on

NAP = 0.3  # s


def steps(rank, kind):
    """dt and own work of the last of three steps."""
    torch.manual_seed(0)
    mesh, clock, model = init_device_mesh("cpu", (3,)), StepClock(torch.device("cpu")), torch.nn.Linear(9, 9)
    wait = Work.wait
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
            if rank.rank == 1:
                time.sleep(NAP)
            loss.backward()
            if kind == "dtensor":
                distribute_tensor(torch.ones(3), mesh, [Shard(0)]).full_tensor()
            clock.lap("dto")
        time.sleep(NAP)  # after the last lap
    assert Work.wait is wait
    read = clock.read()
    return read["dt"], read[OWN]


@pytest.mark.parametrize("kind", ["fsdp", "dtensor"])
def test_own_work_is_the_step_without_waiting(run_on_ranks, kind):
    times = run_on_ranks(steps, 3, kind)
    assert all(dt > 0.9 * NAP for dt, _ in times)  # all wait for the slowest
    assert times[1][1] >= NAP
    assert all(own < dt - NAP / 2 for dt, own in (times[0], times[2]))


def train(rank, outdir, flags):
    step = torch.optim.SGD.step

    def slow_step(*given, **named):
        time.sleep(NAP if rank.rank == 1 else 0)
        return step(*given, **named)

    sizes = {"preset": "debug", "seq_length": 16, "global_batch_size": 3, "max_iters": 3, "optimizer": "sgd"}
    with program_on(rank), patch.object(torch.optim.SGD, "step", slow_step):
        lm.train(configure(lm.Config, **sizes, **flags, device="cpu", plots=False, outdir=outdir))


def test_the_slow_rank_of_a_run_is_named(run_on_ranks, tmp_path, capsys):
    run_on_ranks(train, 3, tmp_path, {"parallel": "fsdp"})
    record = load(tmp_path)
    assert record["dt_own"].dims == ("draw", "rank")
    assert straggler(record).startswith("rank 1 (")
    assert mmm(["history", str(tmp_path), "--ranks"]) == 0
    table, _, sentence = capsys.readouterr().out.rpartition("\n\n")
    assert sentence.startswith("slowest: rank 1 (host ")
    assert float(table.splitlines()[-2].split()[-3]) > NAP  # own seconds of rank 1
