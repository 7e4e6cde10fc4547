"""Wrong plans and models whose loss looks right: what is not looked for while training is found before it, by name.

Two matrices split as one, and other weights on each rank, are in `known_bugs`.
"""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmm.parallel import PartialGradient, Replicated
from mmm_verify import verify

HEAD = 4


class Heads(nn.Module):
    """A norm before matrices that tp shards, and a norm over each head between them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inside = nn.LayerNorm(HEAD)
        self.up = nn.Linear(8, 4 * HEAD)
        self.down = nn.Linear(4 * HEAD, 2)

    def forward(self, x):
        heads = self.up(self.norm(x)).unflatten(-1, (-1, HEAD))
        return self.down(torch.tanh(self.inside(heads)).flatten(-2))


class Branches(nn.Module):
    """The first half of the samples goes left, the other right."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        first = x[:, 0] < 0
        h = x.clone()
        for branch, pick in ((self.left, first), (self.right, ~first)):
            if pick.any():
                h[pick] = branch(x[pick])
        return self.head(h)


class RunningMean(nn.Module):
    """Keeps a mean of its inputs for later, in a buffer or a frozen parameter: of the samples of this rank."""

    def __init__(self, kind=torch.tensor):
        super().__init__()
        self.head = nn.Linear(8, 2)
        mean = torch.zeros(8)
        if kind is nn.Parameter:
            self.mean = nn.Parameter(mean, requires_grad=False)
        else:
            self.register_buffer("mean", mean)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return self.head(x)


class Codebook(RunningMean):
    def __init__(self):
        super().__init__(nn.Parameter)


def make_batch():
    x = torch.randn(8, 8)
    x[:4, 0] = -x[:4, 0].abs()
    x[4:, 0] = x[4:, 0].abs()
    return x, torch.randn(8, 2)


def on_tp(**styles):
    def parallelize(model, mesh):
        return parallelize_module(model, mesh, styles)

    return parallelize


def on_fsdp(model, mesh):
    for unit in (model.left, model.right, model.head, model):
        fully_shard(unit, mesh=mesh)


def on_ddp(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


SEQUENCE = SequenceParallel(sequence_dim=0, use_local_output=True)
# The plan of which each case changes something.
RIGHT = {"norm": Replicated(), "up": ColwiseParallel(), "inside": PartialGradient(), "down": RowwiseParallel()}
# A wrong plan, and what verify says of it.
CASES = {
    "right": (Heads, on_tp(**RIGHT), "tp2", ""),
    "replicated, of heads": (Heads, on_tp(**RIGHT | {"inside": Replicated()}), "tp2", "inside"),
    "partial, of full": (Heads, on_tp(**RIGHT | {"norm": PartialGradient()}), "tp2", "norm"),
    "sequence, of full": (Heads, on_tp(**RIGHT | {"norm": SEQUENCE}), "tp2", "norm"),
    "other units on other ranks": (Branches, on_fsdp, "dp2", "head"),
    "a buffer that each rank writes": (RunningMean, on_ddp, "dp2", "mean"),
    "a parameter that forward writes": (Codebook, on_ddp, "dp2", "mean"),
}


@pytest.mark.parametrize("case", CASES)
def test_found_before_training(case):
    make, parallelize, mesh, name = CASES[case]
    verdict = verify(make, parallelize, make_batch, mesh=mesh)
    if not name:
        assert verdict.same, str(verdict)
    else:
        assert verdict.exit_code != 0, str(verdict)
        assert re.search(name, str(verdict)[str(verdict).find("first difference:") :]), str(verdict)
