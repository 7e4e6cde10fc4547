"""Derivatives of a derivative (forces, penalties on gradients, u'' of a PINN) through modules that tp shards: each
gradient is plain PyTorch's on the full batch."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel

from mmm.errors import ConfigError, LayoutError
from mmm.parallel import Layout, Plan, Replicated, build_mesh, cross_entropy, materialize, parallelize
from mmm.parallel.cp.ring import RingAttention
from mmm.parallel.memory.chunked_loss import ChunkedLoss, DeferredLMHead
from mmm.parallel.tp.local import Columns, ColumnsThenRows, Rows
from mmm.parallel.tp.sections import OwnedRowwise, SectionedColwise
from support.module_kinds import DIM, KINDS, PLACES, TOKENS, VOCABULARY, Host
from support.own_model import CPU, FP64, full, own

HEAD_DIM, BATCH = 2, 4


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 16)
        self.mid = nn.Linear(16, 16)
        self.down = nn.Linear(16, 1)

    def forward(self, x):
        return self.down(self.mid(self.up(x).tanh()).tanh())


class Attention(nn.Module):
    """All query heads share one key and value head. Biases of keys change nothing, so there are none."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)
        self.k = nn.Linear(DIM, HEAD_DIM, bias=False)
        self.v = nn.Linear(DIM, HEAD_DIM)

    def forward(self, x):
        # (batch, heads, seq, head_dim)
        # (batch, heads, seq, head_dim)
        q = self.q(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        attended = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(attended.transpose(1, 2).flatten(2))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x.tanh())


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.three = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        one, two, three = self.three(x).chunk(3, -1)
        return self.out(one.tanh() * two + three.square())


# Models of which a second derivative is taken, and their styles.
CASES = {
    "matrices": (Matrices, {"up": ColwiseParallel(), "mid": RowwiseParallel(), "down": Replicated()}),
    "shared head": (
        Around,
        {
            "attention": ColumnsThenRows(tokens=False),
            "attention.q": Columns(),
            "attention.k": Columns(1),
            "attention.v": Columns(1),
            "attention.out": Rows(),
        },
    ),
    "fused": (Fused, {"three": SectionedColwise(DIM, DIM, DIM), "out": OwnedRowwise()}),
}


def derivative(forward, x, order):
    """Backward of the squares of the `order`-th derivative of a model's output by its input."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
    for _ in range(order - 1):
        (gradient,) = torch.autograd.grad(gradient.pow(3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return x.grad


def distance(result, expected):
    if result is None:
        result = torch.zeros_like(expected)
    return ((result - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def distances(model, plain):
    """Of each gradient."""
    expected = dict(plain.named_parameters())
    return [
        distance(None if p.grad is None else full(p.grad), expected[name.removeprefix("module.")].grad)
        for name, p in model.named_parameters()
        if expected[name.removeprefix("module.")].grad is not None
    ]


def compared(rank, layout, technique, orders):
    """The furthest of all gradients by case and order."""
    results = {}
    for name, (make, styles) in CASES.items():
        for order in orders:
            torch.manual_seed(0)
            model = make()
            plain = make().double()
            plain.load_state_dict(model.state_dict())
            x = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64)
            expected = derivative(plain, x, order)
            model = parallelize(
                model, build_mesh(layout, "cpu"), Plan(styles, fsdp_units=()), FP64, data_parallel=technique
            )
            materialize(model, CPU, 0)
            coordinate = layout.dp_coordinate(rank.rank)
            result = derivative(model, own(x, coordinate, layout.dp), order)
            of_input = distance(result, own(expected, coordinate, layout.dp))
            results[name, order] = max(of_input, *distances(model, plain))
    return results


@pytest.mark.parametrize(
    ("layout", "technique", "orders"),
    [
        (Layout(dp_shard=1, tp=2), "zero1", (1,)),
        pytest.param(Layout(dp_shard=1, tp=2), "zero1", (2, 3), marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=1, tp=2), "zero2", (1, 2, 3), marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2, tp=2), "zero1", (1, 2, 3), marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2, tp=2), "zero2", (1, 2, 3), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_higher_derivatives(run_on_ranks, layout, technique, orders):
    for off in run_on_ranks(compared, layout.ranks, layout, technique, orders):
        assert max(off.values()) < 1e-11, off


def in_place(rank, place):
    """Kinds of modules at a place of a plan: the furthest of all gradients, of those that can be differentiated."""
    results = {}
    for kind in KINDS:
        style, before, after, heads = PLACES[place]
        torch.manual_seed(0)
        model = Host(kind, heads)
        plain = Host(kind, heads).double()
        plain.load_state_dict(model.state_dict())
        x = torch.randn(3, TOKENS, DIM, dtype=torch.float64)
        ids = (torch.arange(3 * TOKENS) % VOCABULARY).view(3, TOKENS)
        plan = Plan({"norm": Replicated(), "before": before, "kind": style, "after": after}, fsdp_units=())
        try:
            expected = derivative(lambda x, plain=plain, ids=ids: plain(x, ids), x, 1)
        except RuntimeError:  # embeddings have no gradient by x; attention's kernel has no second derivative
            continue
        try:
            model = parallelize(model, build_mesh(Layout(tp=2).fit(2), "cpu"), plan, FP64, data_parallel="zero1")
            materialize(model, CPU, 0)
            result = derivative(lambda x, model=model, ids=ids: model(x, ids), x, 1)
        except (LayoutError, RuntimeError, TypeError, AttributeError):  # `test_styles.py`
            continue
        results[kind] = max(distance(result, expected), *distances(model, plain))
    return results


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_second_derivatives_of_each_kind(run_on_ranks, place):
    for off in run_on_ranks(in_place, 2, place):
        assert len(off) > 5
        assert max(off.values()) < 1e-11, off


def refused(rank):
    """What has no second derivative of its own, or a wrong one, says so."""
    mesh = build_mesh(Layout(tp=2).fit(2), "cpu")
    targets = torch.zeros(1, TOKENS, dtype=torch.int64)

    def ring(x):
        heads = x[:, None].contiguous()
        return RingAttention(mesh["tp"])(heads, heads, heads).sum()

    def chunked(x):
        return ChunkedLoss(DeferredLMHead(nn.Linear(DIM, 4, bias=False).double(), 2, torch.float64))(x, targets, 1)

    def sharded(x):
        return cross_entropy(DTensor.from_local(x, mesh["tp"], [Shard(-1)]), targets, 1)

    for function, message in (
        (ring, "ring attention"),
        (chunked, "loss in chunks"),
        (sharded, "logits that tp shards"),
    ):
        x = torch.randn(1, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
        with loss_parallel():
            function(x).backward()
            with pytest.raises(ConfigError, match=f"create_graph=True through .*{message}"):
                torch.autograd.grad(function(x), x, create_graph=True)
    return True


def test_what_has_no_second_derivative_is_refused(run_on_ranks):
    assert run_on_ranks(refused, 2) == [True, True]
