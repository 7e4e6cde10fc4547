"""Styles on plain tensors: outputs and gradients are those of plain PyTorch, with one collective each way."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, SequenceParallel, loss_parallel

from mmm.errors import LayoutError
from mmm.parallel import (
    Layout,
    PartialGradient,
    Plan,
    Replicated,
    build_mesh,
    cross_entropy,
    loaded_values,
    materialize,
    parallelize,
)
from mmm.parallel.tp import local
from mmm.parallel.tp.local import Columns, ColumnsThenRows, Logits, Rows, Vocabulary
from support.own_model import CPU, FP64, gradients

VOCAB = 11
DIM = 8
HIDDEN = 12
TOKENS = 6


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.norm = nn.RMSNorm(2)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        hidden = self.up(x).tanh().unflatten(-1, (-1, 2))
        return self.down(self.norm(hidden).flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.feed_forward = FeedForward()
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.output(x + self.feed_forward(self.norm(x)))


def styles(tokens):
    """With the sequence sharded, or only with whole tokens."""
    matrices = {
        "feed_forward": ColumnsThenRows(tokens),
        "feed_forward.up": Columns(),
        "feed_forward.down": Rows(),
    }
    if tokens:
        return {"embedding": Vocabulary(), "norm": PartialGradient(), "output": Logits(), **matrices}
    return {"embedding": Replicated(), "norm": Replicated(), "output": Replicated(), **matrices}


def compared(rank, layout, tokens):
    """Relative differences of the loss and of each gradient from plain PyTorch's, and the collectives of a step."""
    torch.manual_seed(0)
    plain = Model().double()
    model = Model()
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    model = parallelize(model, build_mesh(layout, "cpu"), Plan(styles(tokens), fsdp_units=()), FP64)
    materialize(model, CPU, 0, values=loaded_values(model, values))
    # The vocabulary is uneven over tp, and its last token is in use.
    inputs = torch.arange(4 * TOKENS).view(4, TOKENS) % VOCAB
    targets = inputs.roll(1, 0)
    own = slice(
        layout.dp_coordinate(rank.rank) * 4 // layout.dp, (layout.dp_coordinate(rank.rank) + 1) * 4 // layout.dp
    )
    expected = cross_entropy(plain(inputs), targets, targets.numel())
    expected.backward()
    with CommDebugMode() as counted, loss_parallel():
        loss = cross_entropy(model(inputs[own]), targets[own], targets.numel())
        loss.backward()
    off = {"loss": relative(full(loss), cross_entropy(plain(inputs[own]), targets[own], targets.numel()))}
    gradient_of = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, gradient in gradients(model).items():
        off[name] = relative(gradient, gradient_of[name.removeprefix("module.")])
    return off, {str(name): count for name, count in counted.get_comm_counts().items()}


def full(loss):
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens sharded", "tokens whole"])
@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=1, tp=2), pytest.param(Layout(dp_shard=2, tp=2), marks=pytest.mark.long)], ids=str
)
def test_as_plain_pytorch(run_on_ranks, layout, tokens):
    for off, _ in run_on_ranks(compared, layout.ranks, layout, tokens):
        assert len(off) == 11
        assert all(difference < 1e-13 for difference in off.values()), off


def test_one_collective_each_way(run_on_ranks):
    """Into and out of the feed-forward layer, out of the embedding, and into the output matrix."""
    for _, counts in run_on_ranks(compared, 2, Layout(dp_shard=1, tp=2), True):
        assert counts["c10d_functional.all_gather_into_tensor"] == 4
        assert counts["c10d_functional.reduce_scatter_tensor"] == 4


def broken(rank, function):
    """The differences where a backward forgets its collective."""

    def without(ctx, gradient):
        if function == "_Gather":
            ranks = ctx.group.size()
            gradient = gradient.chunk(ranks, ctx.dim)[ctx.group.rank()]
        return gradient, *[None] * (2 if function == "_Gather" else 1)

    with patch.object(getattr(local, function), "backward", staticmethod(without)):
        off, _ = compared(rank, Layout(dp_shard=1, tp=2), function == "_Gather")
    return off


@pytest.mark.parametrize("function", ["_Gather", "_Copied"])
def test_a_forgotten_sum_is_seen(run_on_ranks, function):
    for off in run_on_ranks(broken, 2, function):
        assert off["loss"] < 1e-13
        assert off["norm.weight"] > 0.01
        assert off["embedding.weight"] > 0.01


def refused(rank, name, module, style):
    model = nn.ModuleDict({name: module})
    with pytest.raises(LayoutError) as caught:
        parallelize(model, build_mesh(Layout(dp_shard=1, tp=2), "cpu"), Plan({name: style}, fsdp_units=()), FP64)
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "style", "message"),
    [
        (nn.Linear(3, 5), Columns(), "Columns splits 5 features, which 2 ranks do not divide"),
        (nn.Linear(3, 5), Rows(), "Rows splits 3 features, which 2 ranks do not divide"),
        (nn.Conv2d(2, 2, 1), Columns(), "Columns shards an nn.Linear"),
        (nn.Linear(2, 2), Vocabulary(), "Vocabulary shards an nn.Embedding"),
        (
            nn.Embedding(4, 2, padding_idx=0),
            Vocabulary(),
            "Vocabulary takes an embedding without max_norm, padding_idx",
        ),
        (nn.Embedding(4, 2), Logits(), "Logits shards an nn.Linear"),
    ],
)
def test_refusals(run_on_ranks, module, style, message):
    for text in run_on_ranks(refused, 2, "matrix", module, style):
        assert text.startswith("tp 2: matrix (")
        assert message in text


def refused_inside(rank, style):
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))})
    plan = Plan({"block": ColumnsThenRows(), "block.0": style, "block.2": Rows()}, fsdp_units=())
    with pytest.raises(LayoutError) as caught:
        parallelize(model, build_mesh(Layout(dp_shard=1, tp=2), "cpu"), plan, FP64)
    return str(caught.value)


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(),
        SequenceParallel(),
        PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    ],
)
def test_dtensors_inside_of_plain_tensors_are_refused(run_on_ranks, style):
    for text in run_on_ranks(refused_inside, 2, style):
        assert f"block.0 has {type(style).__name__}" in text
        assert "block, which has ColumnsThenRows" in text
