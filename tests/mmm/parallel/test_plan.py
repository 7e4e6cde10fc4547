"""Names in a plan that fit no module are said, once, for the whole model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.layout import Techniques
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout, build_mesh, meta_parameters, parallelize
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan, unmatched
from mmm.parallel.tp.replicated import Replicated
from mmm.run.sharded import shard
from mmm_lab.parity import models
from support import parity_models
from support.own_model import FP64

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# A plan that fits the model above, and one with names that it lacks.
RIGHT = Plan(
    tensor={"blocks.*.0": Replicated(), "blocks.*.1": Replicated()}, fsdp_units=("blocks.*",), stages=("blocks.*",)
)
WRONG = replace(RIGHT, fsdp_units=("block.*",), tensor={**RIGHT.tensor, "head": ColwiseParallel()})
WORDS = [
    "the plan names 'head' (tensor), and Net has no such module: it is passed over",
    "the plan names 'block.*' (fsdp_units), and Net has no such module: it is passed over",
]


@pytest.mark.parametrize("name", [*models.NAMES, *parity_models.NAMES])
def test_the_packages_own_plans_name_nothing_in_vain(name):
    parity = models.find(name)
    with meta_parameters():
        assert unmatched(parity.plan(), parity.model()) == []


def test_what_is_optional_is_still_looked_at_elsewhere():
    config = TransformerConfig(dim=8, n_layers=1, n_heads=2, n_kv_heads=2)
    plan = replace(transformer_plan(), checkpointed=("layer.*",))
    (text,) = unmatched(plan, Transformer(config))
    assert "'layer.*' (checkpointed)" in text


def unnamed(rank):
    with meta_parameters():
        net = Net()
    styles = {"blocks.*.0": ColwiseParallel(), "blocks.0.1": RowwiseParallel()}
    with pytest.raises(LayoutError) as caught:
        parallelize(net, build_mesh(Layout(tp=2, dp_shard=1), "cpu", 30), replace(RIGHT, tensor=styles), FP64)
    return str(caught.value)


def test_a_parameter_without_a_style_is_refused_where_there_is_tp(run_on_ranks):
    message = (
        "tp 2: the plan's `tensor` has no style for blocks.1.1.weight, blocks.1.1.bias, blocks.2.1.weight (and 3 "
        "more): name them, or their modules, as Replicated() where every rank computes the same, PartialGradient() "
        "where each has its own heads"
    )
    assert run_on_ranks(unnamed, 2) == [message, message]


def notes(rank):
    """What `build_parallel_model` leaves in the notes of a run."""
    with meta_parameters():
        net = Net()
    seen = []
    quiet = SimpleNamespace(info=lambda *args: None, debug=lambda *args: None)
    options = SimpleNamespace(timeout=30)
    run = SimpleNamespace(
        rank=rank,
        layout=Layout(dp_shard=1),
        device=CPU,
        options=options,
        seed=0,
        precision=FP64,
        log=quiet,
        clock=SimpleNamespace(model_lap=None),
        describe=lambda **facts: seen.append(facts.get("note")),
        comm=SimpleNamespace(gather=lambda own: [own]),
    )
    partition = partition_model(net, WRONG, run.layout, Techniques(), torch.empty(4, 4, device="meta"))
    resolved = SimpleNamespace(model=net, plan=WRONG, techniques=Techniques(), partition=partition)
    shard(run, resolved)
    return json.dumps([note for note in seen if note is not None])


def test_kept_in_the_runs_notes(run_on_ranks):
    assert json.loads(run_on_ranks(notes, 1)[0]) == WORDS
