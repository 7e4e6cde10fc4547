"""Sums by a tree: the same bits however the lanes are shared between ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmm.parallel.exact.gradients import LaneGradients, TreeReduceScatter
from mmm.parallel.exact.trees import sum_far, sum_near, visiting_order

DRAW = random.Random(11)
# Summands of six orders of magnitude, whose sum depends on the order.
LANES = [DRAW.uniform(-1, 1) * 10.0 ** DRAW.randint(-3, 3) for _ in range(16)]


def test_the_order_matters() -> None:
    # Otherwise the tests below could not fail.
    one_after_the_other = sum(LANES)
    assert len({one_after_the_other, sum_near(LANES), sum_far(LANES)}) == 3


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_near_tree_is_the_same_for_any_number_of_ranks(ranks: int) -> None:
    lanes_per_rank = 16 // ranks
    own = [sum_near(LANES[rank * lanes_per_rank :][:lanes_per_rank]) for rank in range(ranks)]
    assert sum_near(own) == sum_near(LANES)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_far_tree_is_the_same_for_any_number_of_ranks(ranks: int) -> None:
    lanes_per_rank = 16 // ranks
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    gradients = LaneGradients([torch.nn.ParameterList([weight])])
    most = 0
    for lane in visiting_order(lanes_per_rank):
        # One micro-batch: the ranks' lanes of this number are summed over the ranks.
        weight.grad = torch.tensor(sum_far(LANES[lane::lanes_per_rank]), dtype=torch.float64)
        gradients.take()
        most = max(most, len(gradients.sums))
    gradients.put()
    assert weight.grad == sum_far(LANES)
    # As many sums are kept as a number below that of the lanes has ones: 15 lanes are 8 + 4 + 2 + 1.
    assert most == max(1, lanes_per_rank.bit_length() - 1)


def test_visiting_order_reverses_the_bits() -> None:
    assert visiting_order(1) == [0]
    assert visiting_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]


def sum_under_hsdp(rank, terms) -> list[float]:
    """What a rank of two replicas of two shards has after FSDP's reduce-scatter and all-reduce: rank r has term r."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    replicas = mesh["dp_replicate"].get_group()
    both_shards = torch.tensor([terms[dist.get_rank()]] * 2)
    own_shard = torch.empty(1)
    TreeReduceScatter(replicas)(own_shard, both_shards, mesh["dp_shard"].get_group(), dist.ReduceOp.SUM)
    dist.all_reduce(own_shard, group=replicas)
    return own_shard.tolist()


def test_replicas_are_the_outer_axis_of_the_far_tree(run_on_ranks) -> None:
    """If shards were, 1e8 + 1 and -1e8 + 1 would be rounded to 1e8 and -1e8, and the sum would be 0."""
    terms = (1e8, 1.0, -1e8, 1.0)
    assert run_on_ranks(sum_under_hsdp, 4, terms) == [[2.0]] * 4
