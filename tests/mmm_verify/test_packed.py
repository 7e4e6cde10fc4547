"""Two matrices or more in one, of which a rank has its shard of each: DTensor says so with a strided shard."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from mmm_verify import verify
from support.by_hand import average, copy, reduce
from support.clock import long


class Gated(nn.Module):
    """Gate and up are one matrix, of some dims before (experts), that lies along `dim`."""

    def __init__(self, hidden=8, packed=2, experts=0, last=False):
        super().__init__()
        self.before = nn.Linear(6, 6)
        shape = (6, packed * hidden) if last else (packed * hidden, 6)
        down = (6, hidden)
        self.packed, self.last, self.group = packed, last, None
        self.up = nn.Parameter(torch.randn(*([experts] if experts else []), *shape) / 3)
        self.down = nn.Parameter(torch.randn(*([experts] if experts else []), *down) / 3)

    def forward(self, x):
        x = self.before(x)
        up, down = [w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down)]
        if self.group is not None:
            x = copy(x, self.group)
        y = x @ (up if self.last else up.mT)
        first, *others = y.chunk(self.packed, -1)
        for other in others:
            first = F.silu(first) * other
        y = first @ down.mT
        y = y.sum(0) if y.ndim > 2 else y
        return y if self.group is None else reduce(y, self.group)


def rows():
    return torch.randn(8, 6), torch.randn(8, 6)


def piece(tensor, dim, factor, count, index):
    """A rank's piece of each of `factor` pieces."""
    return torch.cat([one.tensor_split(count, dim)[index] for one in tensor.chunk(factor, dim)], dim)


def cut(model, mesh, *, label=None, factor=None, index=None):
    """As it should be cut; or labelled, or cut, in another way.

    Args:
        label: the placement that the DTensor says. factor: of how many pieces the rank has one each. index: which.
    """
    tp = mesh["tp"]
    model.group = tp.get_group()
    rank, size = tp.get_local_rank(), tp.size()
    dim = model.up.ndim - (1 if model.last else 2)
    index = rank if index is None else index(rank)
    up = piece(model.up.detach(), dim, factor or model.packed, size, index)
    down = piece(model.down.detach(), model.down.ndim - 1, 1, size, index)
    label = label or StridedShard(dim, split_factor=model.packed)
    for name, local, placement in (("up", up, label), ("down", down, Shard(model.down.ndim - 1))):
        full = getattr(model, name)
        sharded = DTensor.from_local(local, tp, [placement], run_check=False, shape=full.shape, stride=full.stride())
        setattr(model, name, nn.Parameter(sharded))


def cut_and_averaged(model, mesh):
    cut(model, mesh)
    average(model, mesh["dp"].get_group())


def not_added_up_backward(model, mesh):
    cut(model, mesh)
    model.before.register_forward_hook(lambda module, args, y: y.detach() / 2 + y / 2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def fsdp_of_tp(model, mesh):
    """What FSDP calls strided: it shards what tp has left."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize(
    ("model", "parallelize", "mesh"),
    [
        (Gated, cut, "tp2"),
        long(lambda: Gated(packed=3), cut, "tp2"),
        (lambda: Gated(experts=2), cut, "tp2"),
        long(lambda: Gated(last=True), cut, "tp2"),
        (lambda: Gated(hidden=5), cut, "tp2"),
        long(Gated, cut, "tp4"),
        long(Gated, cut_and_averaged, "dp2,tp2"),
        long(Two, fsdp_of_tp, "dp2,tp2"),
        long(Two, fsdp_of_tp, "dp4,tp2"),
    ],
)
def test_right(model, parallelize, mesh):
    verdict = verify(model, parallelize, rows, mesh=mesh)
    assert verdict.same, f"{verdict}\n{verdict.details}"


@pytest.mark.parametrize(
    ("parallelize", "mesh"),
    [
        (partial(cut, label=Shard(0)), "tp2"),
        (partial(cut, factor=1), "tp2"),
        long(partial(cut, factor=4), "tp2"),
        long(partial(cut, index=lambda rank: 1 - rank), "tp2"),
        long(partial(cut, index=lambda rank: 0), "tp2"),
        long(not_added_up_backward, "tp2"),
        long(cut, "dp2,tp2"),
    ],
)
def test_wrong(parallelize, mesh):
    verdict = verify(Gated, parallelize, rows, mesh=mesh)
    assert verdict.result == "not the same", f"{verdict}\n{verdict.details}"
