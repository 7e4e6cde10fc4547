"""Weights gathered in tiles: the same losses, gradients and shards as gathered whole, and less at once."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from mmm.errors import UserError
from mmm.layout import Techniques
from mmm.models.experts import transformer_of
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, apply, build_mesh, cross_entropy, materialize
from mmm.parallel.checks import check_techniques
from mmm.parallel.dp.weight_tiles import TiledLinear
from mmm.parallel.memory.measure import Peak
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from support import anywhere, reference

CPU = torch.device("cpu")
F64 = torch.float64
LARGE = TransformerConfig(dim=128, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=1024, vocab_size=64)


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


LAYOUTS = [
    (Layout(dp_shard=2), {"checkpointing": "full"}, {"accumulate": 2}),
    (Layout(dp_shard=2, tp=2), {"tile": 2}, {}),
]
LONG = [
    (Layout(dp_shard=1), {"offload": True}, {}),
    (Layout(dp_shard=2), {"offload": True, "loss_chunks": 2}, {"accumulate": 2}),
    (Layout(dp_shard=3), {}, {"global_batch": 6}),  # of 32 rows ranks have 11, 11 and 10
    (Layout(dp_replicate=2, dp_shard=2), {"data_parallel": "hsdp"}, {"accumulate": 2}),
    (Layout(pp=2, dp_shard=2), {}, {"accumulate": 4}),
    (Layout(dp_shard=1, cp=2, tp=2), {}, {}),
]


@pytest.mark.parametrize(
    ("layout", "pieces", "more"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_same_as_whole(run_on_ranks, layout, pieces, more):
    ranks = run_on_ranks(train, layout.ranks, layout, {"tile_weights": 3, **pieces}, more)
    batch = more.get("global_batch", reference.GLOBAL_BATCH)
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2, reference.CONFIG, batch))


@pytest.mark.long
def test_half_precision(run_on_ranks):
    """bf16 products, as close to float64 as gathered whole."""
    more = {"dtype": torch.float32, "compute": torch.bfloat16, "steps": 1}
    whole, tiled = (run_on_ranks(train, 2, Layout(dp_shard=2), {"tile_weights": n}, more)[0] for n in (1, 3))
    (loss,), gradients = reference.train("sgd", F64, 1)
    assert tiled[0] == pytest.approx([loss], rel=1e-3)
    for name, gradient in gradients.items():
        off, usual = ((got[1][name] - gradient).norm() / gradient.norm() for got in (tiled, whole))
        assert off <= 1.5 * usual + 1e-3, name


def model_of(config, layout, **techniques):
    mesh = build_mesh(layout, "cpu")
    with torch.device("meta"):
        model = Transformer(config)
    model = apply(model, mesh, transformer_plan(config), Precision("fp64", F64, F64), **techniques)
    materialize(model, CPU, reference.SEED)
    return model


def shards(rank, layout, tiles):
    """Of every parameter what a checkpoint has: shape, mesh, how it is sharded, and this rank's elements."""
    model = model_of(reference.CONFIG, layout, tile_weights=tiles)
    tiled = [module for module in model.modules() if isinstance(module, TiledLinear)]
    state = model.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    found = {n: (t.shape, t.device_mesh.mesh_dim_names, str(t.placements), t.to_local()) for n, t in state.items()}
    return len(tiled), found


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2), pytest.param(Layout(dp_shard=3), marks=pytest.mark.long)])
def test_shards_are_those_of_fsdp(run_on_ranks, layout):
    whole, tiled = (run_on_ranks(shards, layout.ranks, layout, tiles) for tiles in (1, 3))
    for (none, expected), (count, found) in zip(whole, tiled, strict=True):
        assert (none, count) == (0, 7 * reference.CONFIG.n_layers)
        assert [*found] == [*expected]
        for name, (*how, local) in expected.items():
            assert [*found[name][:3]] == how
            assert torch.equal(found[name][3], local), name


def peak(rank, tiles):
    """Bytes at the peak of a step, beyond parameters, and of the gradients that stay."""
    model = model_of(LARGE, Layout(dp_shard=2), tile_weights=tiles)
    tokens = torch.randint(LARGE.vocab_size, (1, 8), generator=torch.Generator().manual_seed(rank.rank))
    for _ in range(2):  # FSDP sets itself up in the first
        model.zero_grad()
        with Peak(CPU, model) as measured:
            cross_entropy(model(tokens), tokens, 16).backward()
    return measured.bytes


def test_a_tile_at_a_time(run_on_ranks):
    """In whole: two layers gathered, and the gradients of one. In 8 tiles: one tile, or its gradient and this rank's
    half of that; the few activations here and all else are within a tenth of a layer."""
    whole, tiled = (run_on_ranks(peak, 2, tiles)[0] for tiles in (1, 8))
    layer = (4 * LARGE.dim**2 + 3 * LARGE.dim * LARGE.hidden_dim) * 8
    gradients = LARGE.n_layers * layer / 2
    largest = LARGE.dim * LARGE.hidden_dim * 8
    assert whole > gradients + 1.5 * layer
    assert tiled < gradients + 1.5 * largest / 8 + 0.1 * layer


@pytest.mark.parametrize(
    ("layout", "techniques", "words"),
    [
        (Layout(dp_shard=2), {"tile_weights": 0}, "tile_weights 0"),
        (Layout(dp_shard=2), {"data_parallel": "ddp"}, "4 with ddp: every rank has all parameters"),
        (Layout(dp_shard=1, tp=2), {}, "tp2"),
        (Layout(dp_shard=2), {"compile": True}, "4 with compile"),
        (Layout(dp_shard=2), {"checkpointing": "selective"}, "4 with activation checkpointing 'selective'"),
    ],
)
def test_refused(layout, techniques, words):
    model = Transformer(reference.CONFIG)
    with pytest.raises(UserError, match=words):
        check_techniques(model, transformer_plan(), layout, Techniques(**{"tile_weights": 4, **techniques}))


def test_a_model_without_large_matrices_is_refused():
    config = TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, vocab_size=64, n_experts=2)
    for model, plan, words in (
        (Transformer(reference.CONFIG), cnn_plan(), "the plan of this model names no matrices"),
        (transformer_of(config), transformer_plan(config), "the large matrices of this model are experts"),
    ):
        with pytest.raises(UserError, match=words):
            check_techniques(model, plan, Layout(dp_shard=2), Techniques(tile_weights=4))
