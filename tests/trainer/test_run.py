"""What a run's step tells its ranks."""

import math

import pytest
import torch

from mmm.errors import DivergedError
from mmm.parallel import Layout
from mmm.runtime.clock import StepClock
from mmm.runtime.device import Precision
from mmm.runtime.log import get_logger
from mmm.trainer.options import RunOptions
from mmm.trainer.run import Run

CPU = torch.device("cpu")


def diverge(rank):
    """One step whose loss is no number on rank 1 alone: is the error said to be every rank's, and what does it say?"""
    layout = Layout().fit(rank.world_size)
    precision, clock = Precision("fp32", torch.float32, torch.float32), StepClock(CPU)
    ranks = [{"host": f"node{each}"} for each in range(rank.world_size)]
    run = Run(RunOptions(), rank, layout, CPU, precision, clock, get_logger(), None, ranks)
    clock.start()
    with pytest.raises(DivergedError) as raised:
        run.step(3, torch.tensor(math.nan if rank.rank == 1 else 1.0), samples=1)
    return raised.value.on_every_rank, str(raised.value)


def test_a_loss_that_is_no_number_on_one_rank_is_every_ranks_error(pool):
    for everywhere, text in pool.run(diverge, 2):
        assert everywhere
        assert text.startswith("the loss is nan at step 3, from rank 1 on node1: lower --lr")
