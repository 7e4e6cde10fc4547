"""Ranks whose samples use other parameters: gradients are those of plain PyTorch on the full batch, where a parameter
that is not used has the gradient zero."""

import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from mmm.errors import LayoutError
from mmm.parallel import Layout, Plan, sync_gradients
from mmm.runtime.log import get_logger
from mmm.torch_private.fsdp import groups_of
from support.own_model import build, furthest, gradients, own, parameters, plain

RANKS = 2
X = torch.linspace(-3, 3, 48, dtype=torch.float64).view(8, 6).cos()  # rank 0's samples are for `left` alone
UNITS = ("common", "left", "right", "never", "head")


class Net(nn.Module):
    """The widths of the branches differ, so that collectives which pair others' are no mere wrong numbers."""

    def __init__(self):
        super().__init__()
        self.common, self.never, self.head = nn.Linear(6, 8), nn.Linear(3, 3), nn.Linear(8, 2)
        self.left = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        h, first = self.common(x), x[:, 0] < 0
        out = h.clone()
        turns = [(self.left, first), (self.right, ~first)]
        for branch, pick in turns if x[0, 1] > 0 else turns[::-1]:
            if pick.any():
                out[pick] = out[pick] + branch(h[pick])
        return self.head(out)


def batches():
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        x[:4, 0] = -x[:4, 0].abs()
        x[4:, 0] = x[4:, 0].abs() * (-1) ** step  # in every other step the ranks use the same
        yield x


def trained(rank, technique, ranks, micro, plan):
    """Steps of AdamW: how far each step's gradients are, and the weights in the end."""
    layout = Layout(dp_replicate=2, dp_shard=2) if technique == "hsdp" else Layout(dp_shard=ranks)
    model = build(Net, layout, plan, data_parallel=technique)
    net, off = plain(model, Net), []
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, net)]
    for x in batches():
        x, part = x.requires_grad_(), own(x, rank.rank, ranks).requires_grad_()
        for n, some in enumerate(part.chunk(micro)):
            sync_gradients(model, n == micro - 1)
            model(some).square().sum().backward()
        net(x).square().sum().backward()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert all(parameter.grad is not None for parameter in model.parameters())
        off.append(furthest(gradients(model), gradients(net)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            off.append((model(part) - own(net(x), rank.rank, ranks)).abs().max().item())
    return [*off, furthest(parameters(model), parameters(net))]


@pytest.mark.parametrize(
    ("technique", "ranks", "micro", "units"),
    [
        ("fsdp", 2, 1, UNITS),
        ("fsdp", 2, 2, UNITS[::-1]),
        ("ddp", 2, 1, ()),
        ("zero2", 2, 2, ()),
        pytest.param("fsdp", 1, 1, UNITS, marks=pytest.mark.long),
        pytest.param("fsdp", 2, 1, (), marks=pytest.mark.long),
        pytest.param("fsdp", 2, 1, (("left", "right"), "head"), marks=pytest.mark.long),
        pytest.param("fsdp", 4, 2, UNITS, marks=pytest.mark.long),
        pytest.param("hsdp", 4, 1, UNITS, marks=pytest.mark.long),
        pytest.param("zero1", 4, 1, (), marks=pytest.mark.long),
        pytest.param("ddp", 4, 2, (), marks=pytest.mark.long),
    ],
)
def test_unused_parameters_count_as_zero(run_on_ranks, technique, ranks, micro, units):
    for off in run_on_ranks(trained, ranks, technique, ranks, micro, Plan({}, fsdp_units=units)):
        assert max(off) < 1e-12, off


@pytest.mark.long
@pytest.mark.parametrize("when", ["always", "never"])
def test_whatever_is_freed(run_on_ranks, when):
    for off in run_on_ranks(freed, RANKS, when):
        assert max(off) < 1e-12, off


def freed(rank, when):
    """Two forwards before a backward, the ranks' units alike in one of them, either first."""
    model = build(Net, Layout(dp_shard=RANKS), Plan({}, fsdp_units=UNITS), reshard_after_forward=when)
    net, off = plain(model, Net), []
    one, other, *_ = batches()
    for pair in ((one, other), (other, one), (one, one)):
        for each, x in ((model, [own(x, rank.rank, RANKS) for x in pair]), (net, pair)):
            (each(x[0]).square().sum() + each(x[1]).sum()).backward()
        off.append(furthest(gradients(model), gradients(net)))
    return off


def told(rank):
    """What is logged."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    get_logger().addHandler(handler)
    try:
        trained(rank, "fsdp", RANKS, 1, Plan({}, fsdp_units=UNITS))
    finally:
        get_logger().removeHandler(handler)
    return [text for text in records if "units" in text]


def test_the_units_are_named_once(run_on_ranks):
    first, second = run_on_ranks(told, RANKS)
    assert len(first) == 1
    assert "not called alike by all ranks: left (not by rank 1), right (not by rank 0). In such a step" in first[0]
    assert second == []


class Deeper(nn.Module):
    """Goes through its one unit as often as the samples say."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(1 if x[0, 0] < 0 else 2):
            x = self.head(self.block(x))
        return x


def looped(rank):
    model = build(Deeper, Layout(dp_shard=RANKS), Plan({}, fsdp_units=("block", "head")))
    x = next(batches())
    with pytest.raises(LayoutError, match=r"rank 1"):
        model(own(x, rank.rank, RANKS))
    return True


def test_a_unit_that_only_some_ranks_gather_again_is_refused(run_on_ranks):
    assert run_on_ranks(looped, RANKS) == [True] * RANKS


def only_inputs(rank, technique):
    """On rank 1 backward reaches the model's input, and none of its parameters."""

    def make():
        return Gate()

    model = build(make, Layout(dp_shard=RANKS), data_parallel=technique)
    net = plain(model, make)
    x = next(batches()).requires_grad_()
    part = own(x, rank.rank, RANKS).detach().requires_grad_()
    model(part).square().sum().backward()
    net(x).square().sum().backward()
    return furthest(gradients(model), gradients(net))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        first = x[:, 0] < 0
        return x * 2 + torch.zeros_like(x).index_put((first,), self.linear(x[first])) if first.any() else x * 2


@pytest.mark.parametrize("technique", ["ddp", "zero2", "fsdp"])
def test_a_rank_that_uses_no_parameter_at_all(run_on_ranks, technique):
    assert max(run_on_ranks(only_inputs, RANKS, technique)) < 1e-13


def ended_twice(rank):
    """Reductions of the units' gradients in a backward, and in a second end of each unit."""
    plan = Plan({}, fsdp_units=(("common", "head"), "left", "right", "never"))
    model, x = build(Net, Layout(dp_shard=RANKS), plan), next(batches())
    units = [each for each in model.modules() if isinstance(each, FSDPModule)]
    groups = {id(group): group for unit in units for group in groups_of(unit)}.values()
    calls = []
    with mock.patch.object(_fsdp_param_group, "foreach_reduce", counted(calls)):
        for _ in range(2):  # it is reduced again in the next backward
            model(own(x, rank.rank, RANKS)).square().sum().backward()
        first = len(calls)
        for group in groups:
            group.post_backward()
    return len(groups), first, len(calls) - first


def counted(calls, reduce=_fsdp_param_group.foreach_reduce):
    return lambda *given, **named: calls.append(1) or reduce(*given, **named)


def test_a_unit_that_ends_twice_is_reduced_once(run_on_ranks):
    assert run_on_ranks(ended_twice, RANKS) == [(4, 8, 0)] * RANKS
