"""Buffers of a model of a user's own keep, on every layout, what its constructor made them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.data import Batch
from mmm.errors import ConfigError, LayoutError
from mmm.layout import Techniques
from mmm.nn.init import Init
from mmm.parallel import Layout, build_mesh, materialize, meta_parameters, parallelize
from mmm.parallel.dp.wrapped import is_offloaded
from mmm.parallel.initial_weights import check_weights
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan
from mmm.parallel.tp.replicated import Replicated
from support.own_model import FP64

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())
        self.register_buffer("angles", torch.polar(torch.ones(8), torch.arange(8.0)), persistent=False)
        self.register_buffer("table", table)

    def forward(self, x):
        x = x + torch.where(self.mask, x.unsqueeze(-1), 0).sum(-2) * self.angles.real + self.table
        return x + self.norm(self.down(self.up(x).tanh()))


class Last(nn.Module):
    """What tp leaves whole, buffers and all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.register_buffer("scale", torch.linspace(1, 2, 5))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x):
        return self.linear(x) * self.scale


class Net(nn.Module):
    """No rules of its own. The list is gone through, so that a stage has some of it."""

    def __init__(self):
        super().__init__()
        shared = torch.arange(8.0)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList([Block(shared), Block(shared)])
        self.last = Last()

    def forward(self, x):
        x = self.first(x) if self.first is not None else x
        for block in self.blocks:
            x = block(x)
        if self.last is not None:
            return self.last(x)
        return x


def plan() -> Plan:
    return Plan(
        tensor={
            "first.0": Replicated(),
            "first.1": Replicated(),
            "blocks.*.norm": Replicated(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "last": Replicated(),
        },
        fsdp_units=("blocks.*",),
        stages=("first", "blocks.*", "last"),
    )


def buffers(rank, layout, techniques):
    """Each buffer that is here, whole, and which of them are one tensor; after a step in evaluation mode."""
    with meta_parameters():
        net = Net()
    net.eval()
    techniques = Techniques(**techniques)
    partition = partition_model(net, plan(), layout, techniques, torch.empty(4, 8, device="meta"))
    mesh = build_mesh(layout, "cpu")
    made = ParallelModel(net, plan(), mesh, FP64, techniques, partition, device=CPU, seed=0)
    made.forward_backward(Batch(torch.ones(4, 8, dtype=torch.float64), torch.arange(4), 4))
    result, ids = {}, {}
    for module in made.modules.values():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            name = name.removeprefix("module.")
            result[name] = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
            ids[name] = id(buffer)
    return result, ids


@pytest.mark.parametrize(
    ("layout", "techniques"),
    [
        (Layout(dp_shard=2), {}),
        (Layout(dp_shard=2), {"data_parallel": "ddp"}),
        (Layout(dp_shard=2), {"data_parallel": "zero1"}),
        (Layout(dp_shard=1, tp=2), {}),
        (Layout(pp=2, dp_shard=1), {}),
        pytest.param(Layout(dp_shard=2, tp=2), {"offload": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_they_are_what_the_model_made_them(run_on_ranks, layout, techniques):
    plain = Net()
    expected = dict(plain.named_buffers(remove_duplicate=False))
    ranks = run_on_ranks(buffers, layout.ranks, layout, techniques)
    assert set().union(*(result for result, _ in ranks)) == expected.keys()
    for result, ids in ranks:
        for name, got in result.items():
            wanted = expected[name]
            if wanted.is_complex():
                wanted = wanted.to(torch.complex128)
            elif wanted.is_floating_point():
                wanted = wanted.double()
            assert got.dtype == wanted.dtype, name
            assert torch.equal(got, wanted), name
        if layout.pp == 1:
            assert ids["blocks.0.mask"] != ids["blocks.1.mask"]


def offloaded(rank):
    """Kinds of device that parameters and buffers of an offloaded model go to; meta stands for an accelerator."""
    with meta_parameters():
        net = Net()
    parallelize(net, build_mesh(Layout(dp_shard=1), "cpu"), plan(), FP64, offload=True)
    assert is_offloaded(net)
    materialize(net, torch.device("meta"), 0, init="by_name")
    return [{tensor.device.type for _, tensor in named} for named in (net.named_parameters(), net.named_buffers())]


def test_offload_leaves_them_on_the_device(run_on_ranks):
    assert run_on_ranks(offloaded, 1) == [[{"cpu"}, {"meta"}]]


# ---- what is refused, before there is a process group


def test_a_buffer_without_values_is_named():
    with torch.device("meta"):
        net = Net()
    with pytest.raises(
        ConfigError,
        match=r"buffer blocks\.0\.mask \(and \d more\) of Net lies on the meta device, .*"
        r"mmm\.parallel\.meta_parameters\(\)",
    ):
        check_weights(net)


class Everything(nn.Module):
    """A rule for every name, as for parameters it may be."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("bias", torch.ones(2, 2).tril())

    def init_rule(self, name):
        if name.endswith("bias"):
            return Init("constant", 0.0)
        return Init("normal", 1.0)


def test_rules_for_parameters_are_not_for_buffers():
    with torch.device("meta"):
        net = Everything()
    with pytest.raises(ConfigError, match="buffer bias of Everything lies on the meta device"):
        materialize(net, CPU, 0)


def test_statistics_of_pytorchs_own_modules_need_no_values():
    with torch.device("meta"):
        net = nn.BatchNorm1d(3)
    materialize(net, CPU, 0, init="by_name")
    assert (net.running_mean.tolist(), net.running_var.tolist()) == ([0] * 3, [1] * 3)
    assert net.num_batches_tracked.item() == 0


def test_a_parameter_without_a_rule_is_refused_before_ranks_meet():
    class Bare(Net):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(8))

    with meta_parameters():
        net = Bare()
    with pytest.raises(ConfigError, match="init_rule"):
        partition_model(net, plan(), Layout(dp_shard=2), Techniques(), torch.empty(4, 8, device="meta"))


class Dictionary(Net):
    """Each stage gives a dict, and takes one."""

    def forward(self, x):
        x = self.first(x) if self.first is not None else x["x"]
        for block in self.blocks:
            x = block(x)
        if self.last is not None:
            return self.last(x)
        return {"x": x}


def test_a_stage_that_sends_no_tensors_is_refused_under_pp():
    with meta_parameters():
        net = Dictionary()
    net.eval()
    expected = r"stage 0 of Dictionary \(first, blocks\.0\) cannot run by itself: TypeError: it returns dict, but can"
    with pytest.raises(LayoutError, match=expected):
        partition_model(net, plan(), Layout(pp=2, dp_shard=1), Techniques(), torch.empty(4, 8, device="meta"))
