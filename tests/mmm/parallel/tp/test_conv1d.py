"""GPT-2's matrices, kept as (in, out): by columns, by rows, and q, k and v side by side; saved as they are."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.parallel import Layout, Plan, Replicated, build_mesh, loaded_values, materialize, parallelize
from mmm.parallel.plan import sharded_dim
from mmm.parallel.tp.sections import SectionedColwise
from mmm.run.save_model import full_tensors
from support.module_kinds import Conv1D
from support.own_model import CPU, FP64, gradients

# Channels of the model, of a head, and of all keys.
DIM, HEAD_DIM, KV = 16, 4, 8


class Block(nn.Module):
    """`fused`: the class of q, k and v side by side; as a Linear two key/value heads for four query heads."""

    def __init__(self, fused):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        if fused is Conv1D:
            self.c_attn = Conv1D(3 * DIM, DIM)
        else:
            self.c_attn = nn.Linear(DIM, DIM + 2 * KV)
        self.c_proj = Conv1D(DIM, DIM)
        self.c_fc = Conv1D(4 * DIM, DIM)
        self.c_out = Conv1D(DIM, 4 * DIM)

    def forward(self, x):
        x = x + self.c_proj(self.attention(self.norm(x)))
        hidden = torch.tanh(self.c_fc(x))
        return x + self.c_out(hidden)

    def attention(self, x):
        qkv = self.c_attn(x)
        # The widths of this rank's q, k and v: where keys have fewer heads, q is as wide as both others.
        shares = [1, 1, 1] if isinstance(self.c_attn, Conv1D) else [2, 1, 1]
        width = qkv.shape[-1] // sum(shares)
        channels = qkv.split([width * share for share in shares], -1)
        # (batch, heads, seq, head_dim)
        q, k, v = (some.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for some in channels)
        # Each head of keys and values serves several of queries.
        queries = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(queries, 1)
        v = v.repeat_interleave(queries, 1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return heads.transpose(1, 2).flatten(2)


def plan_of(fused):
    widths = (DIM, DIM, DIM) if fused is Conv1D else (DIM, KV, KV)
    styles = {
        "*.norm": Replicated(),
        "*.c_attn": SectionedColwise(*widths),
        "*.c_proj": RowwiseParallel(),
        "*.c_fc": ColwiseParallel(),
        "*.c_out": RowwiseParallel(),
    }
    return Plan(styles, fsdp_units=("*",), checkpointed=("*",))


def train(rank, layout, fused, fields):
    """How far losses, gradients, and the saved state after a step are off plain PyTorch."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(fused), Block(fused)).double()
    model = nn.Sequential(Block(fused), Block(fused))
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    plan = plan_of(fused)
    for name, p in model.named_parameters():
        assert p.shape == state[name].shape
    model = parallelize(model, build_mesh(layout, "cpu"), plan, FP64, **fields)
    materialize(model, CPU, 0, values=loaded_values(model, state))
    for name, p in model.named_parameters():
        dim = sharded_dim(plain, plan, name)
        # The last axis of the mesh is tp.
        tp = p.placements[-1]
        assert (tp.dim if tp.is_shard() else None) == dim, name
    x = torch.randn(8, 5, DIM, dtype=torch.float64)
    # The samples of this dp coordinate.
    size = 8 // layout.dp
    first = layout.dp_coordinate(rank.rank) * size
    own = slice(first, first + size)
    output = model(x[own])
    expected = plain(x)
    off = {"output": relative(output, expected[own])}
    output.square().sum().backward()
    expected.square().sum().backward()
    expected_gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in gradients(model).items():
        off[f"grad {name}"] = relative(gradient, expected_gradients[name])
    for net in (model, plain):
        torch.optim.SGD(net.parameters(), lr=0.01).step()
    saved = dict(full_tensors([model]))
    for name, value in plain.state_dict().items():
        off[name] = relative(saved[name], value)
    return off


def relative(a, b):
    """The largest difference, in units of the largest value of `b`."""
    difference = (a - b).abs().max()
    return (difference / b.abs().max()).item()


CASES = [(Layout(dp_shard=1, tp=2), Conv1D, {})]
# Combinations of the axes with the same module.
LONG = [
    (Layout(dp_shard=2, tp=2), nn.Linear, {}),
    (Layout(dp_shard=2, tp=2), Conv1D, {"checkpointing": "full"}),
    (Layout(dp_shard=1, tp=2), nn.Linear, {"checkpointing": "selective"}),
    (Layout(dp_shard=2, tp=2), Conv1D, {"reshard_after_forward": "always"}),
]


CASES += [pytest.param(*case, marks=pytest.mark.long) for case in LONG]


@pytest.mark.parametrize(("layout", "fused", "fields"), CASES, ids=str)
def test_side_by_side(run_on_ranks, layout, fused, fields):
    for off in run_on_ranks(train, layout.ranks, layout, fused, fields):
        # The output, and gradients and values of ten parameters in each of two blocks.
        assert len(off) == 1 + 2 * 20
        assert max(off.values()) < 1e-13, off


def refusal(rank, style):
    plan = plan_of(Conv1D)
    plan = replace(plan, tensor=plan.tensor | {"*.c_attn": style})
    model = nn.Sequential(Block(Conv1D))
    mesh = build_mesh(Layout(dp_shard=1, tp=2), "cpu")
    with pytest.raises(LayoutError) as caught:
        parallelize(model, mesh, plan, FP64)
    return str(caught.value)


@pytest.mark.parametrize(
    ("style", "pattern"),
    [
        (SectionedColwise(16, 16), "SectionedColwise is given 16 + 16 columns, and there are 48: give those of each"),
        (
            SectionedColwise(15, 17, 16),
            "SectionedColwise splits 15 columns, which 2 ranks do not divide: use a tp that does",
        ),
    ],
)
def test_widths_are_checked(run_on_ranks, style, pattern):
    for message in run_on_ranks(refusal, 2, style):
        assert message == f"tp 2: 0.c_attn (Conv1D): {pattern}"
