"""A sequence that is sharded over ranks: the same attention, the same losses and the same gradients as whole."""

import itertools

import pytest
import torch

from mmm.data import Batch
from mmm.errors import ConfigError, LayoutError, UserError
from mmm.layout import SEQUENCE_STYLES
from mmm.models.cnn.model import CNNConfig
from mmm.models.cnn.plan import cnn_plan
from mmm.models.definition import check_sizes
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.vit.model import ViTConfig
from mmm.nn.attention import Documents, causal_attention
from mmm.parallel import Layout, Techniques, build_mesh
from mmm.parallel.compile import check_compile
from mmm.parallel.cp import block_attention
from mmm.parallel.cp.block_attention import block_backward, block_forward, merge, tiled_backward, tiled_forward
from mmm.parallel.cp.context_parallel import apply_context_parallel, attention_over_cp
from mmm.parallel.cp.ring import positions_of
from mmm.parallel.cp.styles import check_context_parallel, resolve_ulysses
from support import anywhere, reference
from support.shards import shard_batch

# ---- the shards


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_token_once_and_the_same_work(cp):
    seq = 12 * cp
    parts = [positions_of(coordinate, cp, seq).tolist() for coordinate in range(cp)]
    assert sorted(itertools.chain(*parts)) == list(range(seq))
    # A query sees the keys up to its own: as many in all on each coordinate.
    keys = {sum(position + 1 for position in positions) for positions in parts}
    assert len(keys) == 1
    for positions in parts:
        assert positions == sorted(positions)


def test_inputs_and_targets_are_cut_alike():
    rows = torch.arange(2 * 17).view(2, 17)
    batch = Batch(rows[:, :-1], rows[:, 1:], count=32)
    shard, positions = shard_batch(batch, coordinate=1, cp=2)
    assert positions.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert shard.inputs[0].tolist() == positions.tolist()
    assert torch.equal(shard.targets, shard.inputs + 1)
    assert shard.count == 32
    with pytest.raises(ValueError, match="18 tokens"):
        positions_of(0, 2, 18)


# ---- attention alone


# Of each token, where its document begins: two samples of several documents.
FIVE_DOCUMENTS = [0] * 3 + [3] * 2 + [5] * 5 + [10] * 3 + [13] * 2 + [15]
THREE_DOCUMENTS = [0] * 7 + [7] * 3 + [10] * 6
STARTS = torch.tensor([FIVE_DOCUMENTS, THREE_DOCUMENTS])


def qkv(heads, kv_heads, seq=16, dtype=torch.float64):
    """q, k, v, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, n, seq, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tile", [512, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_blocks_put_together(monkeypatch, dtype, tile, kv_heads):
    """The fused kernel and the one that is written out; queries 8 … 15 to keys 0 … 7, and to their own."""
    monkeypatch.setattr(block_attention, "TILE", tile)
    # A few roundings of each type.
    bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    q, k, v, gradient = (t.double() for t in qkv(4, kv_heads, dtype=dtype))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    full = causal_attention(*inputs)[:, :, 8:]
    expected = torch.autograd.grad(full, inputs, gradient[:, :, 8:])
    last = slice(8, None)
    q, k, v, gradient = (t.detach().to(dtype) for t in (q[:, :, last], k, v, gradient[:, :, last]))
    # Of each, the keys, and whether some come after a query.
    blocks = [(slice(0, 8), False), (slice(8, 16), True)]
    for forward, backward in ((block_forward, block_backward), (tiled_forward, tiled_backward)):
        parts = [forward(q, k[:, :, keys], v[:, :, keys], causal) for keys, causal in blocks]
        # (batch, heads, queries, head_dim), (batch, heads, queries)
        out, lse = merge(*parts[0], *parts[1])
        assert (out - full).abs().max() <= bound
        dq = torch.zeros_like(expected[0])
        dk = torch.zeros_like(expected[1])
        dv = torch.zeros_like(expected[2])
        for keys, causal in blocks:
            ours = backward(gradient, q, k[:, :, keys], v[:, :, keys], out.to(dtype), lse, causal)
            # Queries 8 to 15 are in both blocks, and each key in one.
            dq[:, :, 8:] += ours[0]
            dk[:, :, keys] += ours[1]
            dv[:, :, keys] += ours[2]
        for got, right in zip((dq, dk, dv), expected, strict=True):
            difference = (got - right).abs().max()
            assert difference / right.abs().max() <= 2 * bound


def techniques_of(style):
    """And of usp, whose cp is 4 here, the size of its groups."""
    if style == "usp":
        return {"cp_style": style, "ulysses": 2}
    return {"cp_style": style}


def attend(rank, cp, style, heads, kv_heads, dtype, *documents):
    """This rank's part of the output, and of the gradients of q, k, v."""
    mesh = build_mesh(Layout(dp_shard=1, cp=cp), "cpu")
    ulysses = Techniques(**techniques_of(style)).ulysses_size(cp)
    attention = attention_over_cp(mesh, ulysses, causal_attention)
    tensors = qkv(heads, kv_heads, dtype=dtype)
    *inputs, gradient = (t[:, :, positions_of(rank.rank, cp, 16)] for t in tensors)
    inputs = [t.requires_grad_() for t in inputs]
    out = attention(*inputs, *documents)
    gradients = torch.autograd.grad(out, inputs, gradient)
    return [t.detach() for t in (out, *gradients)]


def attend_on_one(heads, kv_heads, *documents):
    """The output on one device, and the gradients of q, k, v."""
    *inputs, gradient = qkv(heads, kv_heads)
    inputs = [t.requires_grad_() for t in inputs]
    out = causal_attention(*inputs, *documents)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


# Style, cp, heads of queries, and heads of keys and values.
CASES = [("usp", 4, 8, 2), ("usp", 4, 6, 1)]
for name in ("ring", "ulysses"):
    CASES += [(name, 2, 4, 4), (name, 2, 8, 2), (name, 2, 4, 1), (name, 4, 8, 2)]
    CASES.append(pytest.param(name, 4, 8, 1, marks=pytest.mark.long))


@pytest.mark.parametrize("documents", [(), (Documents.of(STARTS),)], ids=["one text", "documents"])
@pytest.mark.parametrize(("style", "cp", "heads", "kv_heads"), CASES)
def test_attention(run_on_ranks, style, cp, heads, kv_heads, documents):
    expected = attend_on_one(heads, kv_heads, *documents)
    ranks = run_on_ranks(attend, cp, cp, style, heads, kv_heads, torch.float64, *documents)
    for coordinate, got in enumerate(ranks):
        positions = positions_of(coordinate, cp, 16)
        for local, full in zip(got, expected, strict=True):
            assert (local - full[:, :, positions]).abs().max() <= 1e-12


@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_attention_in_half_precision(run_on_ranks, style):
    """Put together in float32: as close to the truth as bfloat16 is."""
    expected = attend_on_one(8, 2)
    ranks = run_on_ranks(attend, 2, 2, style, 8, 2, torch.bfloat16)
    for coordinate, got in enumerate(ranks):
        positions = positions_of(coordinate, 2, 16)
        for local, full in zip(got, expected, strict=True):
            assert local.dtype == torch.bfloat16
            difference = (local - full[:, :, positions]).abs().max()
            # bfloat16 has 8 bits.
            assert difference <= 3e-2 * full.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("style", SEQUENCE_STYLES)
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_with_activation_checkpointing(run_on_ranks, checkpointing, style):
    techniques = techniques_of(style) | {"checkpointing": checkpointing}
    cp = 4 if style == "usp" else 2
    ranks = run_on_ranks(anywhere.train, cp, Layout(dp_shard=1, cp=cp), techniques)
    anywhere.assert_same(ranks, reference.train("sgd", torch.float64, 2))


# ---- what is refused


@pytest.mark.parametrize(
    ("layout", "seq", "ulysses", "message"),
    [
        (Layout(dp_shard=1, cp=4), 36, 1, r"seq_length 36"),
        (Layout(dp_shard=1, cp=3), 96, 3, r"n_heads 32"),
        (Layout(dp_shard=1, cp=16, tp=4), 512, 16, r"n_heads 32"),
        (Layout(dp_shard=1, cp=6), 96, 3, r"n_heads 32"),
        (Layout(dp_shard=1, cp=32, tp=4), 512, 16, r"n_heads 32"),
    ],
)
def test_a_sequence_that_cannot_be_cut(layout, seq, ulysses, message):
    with pytest.raises(LayoutError, match=message):
        check_sizes(TransformerConfig(), layout, seq, ulysses)


def test_refused():
    layout = Layout(dp_shard=1, cp=2)
    check_sizes(TransformerConfig(), Layout(dp_shard=1, cp=3), 96)
    with pytest.raises(LayoutError, match=r"compile with cp 2: .* use cp 1"):
        check_compile(layout, "none")
    with pytest.raises(LayoutError, match="cp 2: the ViT"):
        check_sizes(ViTConfig(), layout)
    with pytest.raises(LayoutError, match="cp 2: an image has no sequence"):
        check_sizes(CNNConfig(), layout)


@pytest.mark.parametrize(
    ("techniques", "message"),
    [
        ({"cp_style": "rings"}, "cp_style"),
        ({"cp_style": "ring", "ulysses": 2}, "ulysses 2 with cp_style"),
        ({"cp_style": "usp"}, "cp_style"),
        ({"cp_style": "usp", "ulysses": 5}, "ulysses 5"),
        ({"cp_style": "usp", "ulysses": 0}, "ulysses 0"),
    ],
    ids=str,
)
def test_a_style_that_does_not_go(techniques, message):
    with pytest.raises(UserError, match=message):
        check_context_parallel(Techniques(**techniques), Layout(dp_shard=1, cp=12))


@pytest.mark.parametrize(
    ("cp", "tp", "heads", "ranks_per_host", "expected"),
    [(8, 1, 32, 4, 4), (8, 2, 32, 4, 2), (8, 1, 6, 4, 2), (8, 4, 32, 2, 1), (4, 1, 32, 8, 4), (12, 1, 32, 6, 2)],
)
def test_by_default_the_ranks_of_a_host_share_heads(cp, tp, heads, ranks_per_host, expected):
    layout = Layout(dp_shard=12, cp=cp, tp=tp)
    usp = Techniques(cp_style="usp")
    assert resolve_ulysses(usp, layout, heads, ranks_per_host).ulysses == expected
    ring = Techniques(cp_style="ring")
    assert resolve_ulysses(ring, layout, heads, ranks_per_host) == Techniques()
    # No host, or hosts that do not divide cp.
    for unknown in (None, 7):
        with pytest.raises(ConfigError, match="nothing says which ranks of cp share a host: give ulysses, one of 1, "):
            resolve_ulysses(usp, layout, heads, unknown)


def test_a_plan_without_attention_is_refused(run_on_ranks):
    run_on_ranks(refused_plan, 2)


def refused_plan(rank):
    mesh = build_mesh(Layout(dp_shard=1, cp=2), "cpu")
    with pytest.raises(ConfigError, match="cp 2: the plan of this model names no attention"):
        apply_context_parallel(Transformer(TransformerConfig()), mesh, cnn_plan(), 1)
