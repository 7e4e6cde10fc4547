"""Parameters of one's own beside sharded modules: named by themselves or by their module, right on every mesh."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.parallel import Layout, PartialGradient, Plan, Replicated, build_mesh, materialize, parallelize
from support.own_model import CPU, FP64, build, furthest, gradients, plain

DIM, HEADS = 8, 4


class Block(nn.Module):
    """Scales of each head, of a list, and of the residual, in one module with the matrices."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM * HEADS)
        self.down = nn.Linear(DIM * HEADS, DIM)
        self.head_scale = nn.Parameter(torch.rand(DIM))
        self.shifts = nn.ParameterList([torch.rand(DIM), torch.rand(1)])
        self.residual = nn.Parameter(torch.rand(DIM))

    def forward(self, x):
        # (batch, heads, dim)
        heads = self.up(self.norm(x)).unflatten(-1, (-1, DIM))
        heads = heads * self.head_scale + self.shifts[0] * self.shifts[1]
        return x * self.residual + self.down(torch.tanh(heads).flatten(-2))


class Net(nn.Module):
    """A class token and positions that are the model's own, as in a ViT."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.rand(1, 1, DIM))
        self.positions = nn.Parameter(torch.rand(6, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        # (batch, 5, dim) → (batch, 3)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


# Styles of the modules.
MATRICES = {
    "blocks.*.norm": Replicated(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": Replicated(),
}
# Styles of parameters that are no module's weight.
OWN = {
    "token": Replicated(),
    "positions": Replicated(),
    "blocks.*.head_scale": PartialGradient(),
    # A ParameterList.
    "blocks.*.shifts": PartialGradient(),
    "blocks.*.residual": Replicated(),
}
# What is not named by itself.
BY_MODULE = {**OWN, "blocks.*": PartialGradient()}
del BY_MODULE["blocks.*.head_scale"], BY_MODULE["blocks.*.shifts"]


def train(rank, layout, styles, fields, rest=None):
    """How far outputs and gradients of two micro-batches are off plain PyTorch."""
    torch.manual_seed(0)
    model = Net()
    plain = Net().double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 5, DIM, dtype=torch.float64)
    plain(x).square().sum().backward()
    plan = Plan({**MATRICES, **styles}, fsdp_units=("blocks.*",), checkpointed=("blocks.*",), rest=rest)
    model = parallelize(model, build_mesh(layout, "cpu"), plan, FP64, **fields)
    materialize(model, CPU, 0)
    own = 8 // layout.dp
    for micro_batch in x[layout.dp_coordinate(rank.rank) * own :][:own].chunk(2):
        model(micro_batch).square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    return {
        name: ((g - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name, g in gradients(model).items()
    }


TP2 = Layout(dp_shard=1, tp=2)
DP2_TP2 = Layout(dp_shard=2, tp=2)
CASES = [(DP2_TP2, OWN, {"checkpointing": "full"})]
# Combinations of the axes and techniques.
LONG = [
    (TP2, OWN, {}),
    (TP2, BY_MODULE, {}),
    (TP2, OWN, {"checkpointing": "selective"}),
    (DP2_TP2, BY_MODULE, {"reshard_after_forward": "always"}),
    (Layout(dp_replicate=2, dp_shard=1, tp=2), BY_MODULE, {}),
]


@pytest.mark.parametrize(
    ("layout", "styles", "fields"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_own_parameters(run_on_ranks, layout, styles, fields):
    for off in run_on_ranks(train, layout.ranks, layout, styles, fields):
        assert len(off) == 24
        assert max(off.values()) < 1e-13, off


def test_the_rest_of_a_plan(run_on_ranks):
    """It is the style of all parameters without one: a parameter of the model, and one next to sharded matrices."""
    partial = {name: style for name, style in OWN.items() if isinstance(style, PartialGradient)}
    for off in run_on_ranks(train, 2, TP2, partial, {}, Replicated()):
        assert len(off) == 24
        assert max(off.values()) < 1e-13, off


def refusal(rank, styles, rest=None):
    try:
        train(rank, TP2, styles, {}, rest)
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize(
    ("styles", "pattern"),
    [
        (
            {n: s for n, s in OWN.items() if "residual" not in n},
            "blocks.0.residual, blocks.1.residual",
        ),
        (
            {**OWN, "blocks.1.residual": PartialGradient()},
            "blocks.1.residual",
        ),
    ],
)
def test_refused_by_name(run_on_ranks, styles, pattern):
    for message in run_on_ranks(refusal, 2, styles):
        assert message
        assert message.startswith("tp 2: ")
        assert pattern in message


def test_a_rest_that_is_no_style(run_on_ranks):
    for message in run_on_ranks(refusal, 2, {}, nn.Identity()):
        assert message
        assert "`rest` is Identity()" in message


class Tables(nn.Module):
    def __init__(self, rows, padding):
        super().__init__()
        self.tokens = nn.Embedding(8, DIM)
        self.others = nn.Embedding(rows, DIM, padding_idx=padding)

    def forward(self, x):
        return self.tokens(x).sin() + self.others(x)


def look_up(rank, rows, padding):
    """How far the gradients of two Embeddings, both sharded by rows, are off plain PyTorch."""
    plan = Plan({name: RowwiseParallel(input_layouts=Replicate()) for name in ("tokens", "others")}, fsdp_units=())
    model = build(lambda: Tables(rows, padding), TP2, plan)
    expected = plain(model, lambda: Tables(rows, padding))
    x = torch.tensor([[0, 1, 5, 5], [1, 2, 7, 3]])
    for net in (model, expected):
        net(x).square().sum().backward()
    return furthest(gradients(model), gradients(expected))


@pytest.mark.parametrize(("rows", "padding"), [(16, None), (8, 1)])
def test_an_embedding_is_not_taken_for_another(run_on_ranks, rows, padding):
    """Of another number of rows, or with another option: up to 2.10, PyTorch ends with an assertion, or the other's
    shape."""
    assert max(run_on_ranks(look_up, 2, rows, padding)) < 1e-12
