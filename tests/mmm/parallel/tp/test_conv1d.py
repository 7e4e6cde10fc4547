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
        normed = self.c_attn(self.norm(x))
        width = normed.shape[-1] // (3 if isinstance(self.c_attn, Conv1D) else 4)
        widths = [width] * 3 if isinstance(self.c_attn, Conv1D) else [2 * width, width, width]
        q, k, v = (channels.unflatten(-1, (-1, HEAD_DIM)) for channels in normed.split(widths, -1))
        # (batch, heads, seq, head_dim)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        # Each head of keys and values serves several of queries.
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.c_out(torch.tanh(self.c_fc(x)))


def plan_of(fused):
    widths = (DIM, DIM, DIM) if fused is Conv1D else (DIM, KV, KV)
    styles = {"*.norm": Replicated(), "*.c_attn": SectionedColwise(*widths), "*.c_proj": RowwiseParallel()}
    return Plan(
        {**styles, "*.c_fc": ColwiseParallel(), "*.c_out": RowwiseParallel()}, fsdp_units=("*",), checkpointed=("*",)
    )


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
        assert [q.dim for q in p.placements[-1:] if q.is_shard()] == ([] if dim is None else [dim]), name
    x = torch.randn(8, 5, DIM, dtype=torch.float64)
    own = x[layout.dp_coordinate(rank.rank) * (8 // layout.dp) :][: 8 // layout.dp]
    off = {
        "output": relative(model(own), plain(x)[layout.dp_coordinate(rank.rank) * (8 // layout.dp) :][: 8 // layout.dp])
    }
    model(own).square().sum().backward()
    plain(x).square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    off |= {f"grad {name}": relative(g, expected[name]) for name, g in gradients(model).items()}
    for net in (model, plain):
        torch.optim.SGD(net.parameters(), lr=0.01).step()
    saved = dict(full_tensors([model]))
    return off | {name: relative(saved[name], value) for name, value in plain.state_dict().items() if name in saved}


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


CASES = [(Layout(dp_shard=1, tp=2), Conv1D, {})]
# Combinations of the axes with the same module.
LONG = [
    (Layout(dp_shard=2, tp=2), nn.Linear, {}),
    (Layout(dp_shard=2, tp=2), Conv1D, {"checkpointing": "full"}),
    (Layout(dp_shard=1, tp=2), nn.Linear, {"checkpointing": "selective"}),
    (Layout(dp_shard=2, tp=2), Conv1D, {"reshard_after_forward": "always"}),
]


@pytest.mark.parametrize(
    ("layout", "fused", "fields"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_side_by_side(run_on_ranks, layout, fused, fields):
    for off in run_on_ranks(train, layout.ranks, layout, fused, fields):
        assert len(off) >= 1 + 20
        assert max(off.values()) < 1e-13, off


def refusal(rank, style):
    plan = plan_of(Conv1D)
    plan = replace(plan, tensor=plan.tensor | {"*.c_attn": style})
    with pytest.raises(LayoutError) as caught:
        parallelize(nn.Sequential(Block(Conv1D)), build_mesh(Layout(dp_shard=1, tp=2), "cpu"), plan, FP64)
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
