"""The refusals that docs/models.md shows are those that are made."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import parametrizations

from mmm.errors import LayoutError
from mmm.parallel import Layout, PartialGradient, Plan, Replicated, build_mesh, parallelize
from support.own_model import FP64

DOCS = Path(__file__).parents[4] / "docs"


class Model(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        self.positions = nn.Parameter(torch.rand(2))
        for name, module in modules.items():
            self.add_module(name, module)


CASES = [
    ({"norm": nn.LayerNorm(8)}, {"norm": ColwiseParallel()}),
    ({"up": nn.Linear(8, 7)}, {"up": ColwiseParallel()}),
    ({"up": parametrizations.weight_norm(nn.Linear(8, 8))}, {"up": ColwiseParallel()}),
    ({"tokens": nn.Embedding(8, 8)}, {"tokens": RowwiseParallel()}),
    ({"norm": nn.BatchNorm1d(8)}, {"norm": PartialGradient()}),
    ({}, {"position?": Replicated(), "positions": PartialGradient()}),
]


def refusals(rank):
    messages = []
    for modules, styles in CASES:
        with pytest.raises(LayoutError) as caught:
            parallelize(
                Model(**modules), build_mesh(Layout(dp_shard=1, tp=2), "cpu"), Plan(styles, fsdp_units=()), FP64
            )
        messages.append(str(caught.value))
    return messages


def test_refusals(run_on_ranks):
    shown = re.findall(r"^tp 2: .*", (DOCS / "models.md").read_text(), re.MULTILINE)
    assert run_on_ranks(refusals, 2) == [shown, shown]
