"""Layouts: fitted to the ranks, or refused with the numbers and the line that fits, before any process group. Groups
for each direction between two ranks of a pipeline. What a rank sends in one call, by the best algorithm."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.models.costs import heads_over_cp
from mmm.models.definition import check_sizes
from mmm.models.llama.model import TransformerConfig
from mmm.parallel import Layout, Mesh, Plan, batch_sizes, materialize, meta_parameters, parallelize, to_local
from mmm.parallel.collective_bytes import Call, factor
from mmm.parallel.mesh import neighbour_rounds
from mmm.runtime.device import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layout", "ranks", "name"),
    [
        (Layout(tp=4), 4, "tp4"),
        (Layout(tp=2), 8, "dp4·tp2"),
        (Layout(), 1, "1"),
        (Layout(pp=2, tp=2), 8, "pp2·dp2·tp2"),
        (Layout(dp_replicate=2, tp=2), 8, "dp_replicate2·dp_shard2·tp2"),
    ],
)
def test_fit(layout, ranks, name):
    fitted = layout.fit(ranks)
    assert str(fitted) == name
    assert fitted.ranks == ranks


def test_coordinates_are_those_of_the_mesh():
    layout = Layout(pp=2, dp_replicate=2, dp_shard=3, tp=2)
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert places[0] == dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 0)
    assert [p["tp"] for p in places[:4]] == [0, 1, 0, 1]
    assert len({tuple(p.values()) for p in places}) == 24
    assert places[23] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 0, "tp": 1}
    assert [layout.dp_coordinate(rank) for rank in range(0, 12, 2)] == list(range(6))
    assert layout.loss_ranks() == list(range(12, 24, 2))
    assert [rank for rank in range(24) if layout.has_loss(rank)] == layout.loss_ranks()


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        (Layout(tp=3), 4, "start 3"),
        (Layout(tp=4), 1, "start 4"),
        (Layout(dp_shard=2, tp=2), 8, "dp2·tp2 has 4"),
        (Layout(tp=0), 4, "tp 0: an axis of the mesh has at least 1"),
        (Layout(dp_shard=-2), 4, "dp_shard -2"),
    ],
)
def test_refused(layout, ranks, message):
    with pytest.raises(LayoutError, match=message):
        layout.fit(ranks)


@pytest.mark.parametrize(
    ("batch", "global_batch", "dp", "sizes"),
    [(None, None, 4, (16, 64)), (2, None, 4, (2, 8)), (None, 8, 4, (2, 8)), (2, 8, 4, (2, 8))],
)
def test_batch_sizes(batch, global_batch, dp, sizes):
    assert batch_sizes(batch, global_batch, dp, default=16) == sizes


@pytest.mark.parametrize(
    ("batch", "global_batch", "dp", "message"),
    [
        (2, 16, 4, "global_batch_size 16"),
        (None, 10, 4, "global_batch_size 10"),
        (0, None, 4, "batch_size 0"),
        (None, -8, 4, "global_batch_size -8"),
    ],
)
def test_batches_that_do_not_fit(batch, global_batch, dp, message):
    with pytest.raises(LayoutError, match=message):
        batch_sizes(batch, global_batch, dp, default=16)


@pytest.mark.parametrize(
    ("config", "tp", "seq", "message"),
    [
        ({}, 3, 96, "n_heads 32"),
        ({"n_kv_heads": 32}, 64, 192, "n_heads 32"),
        ({"ffn_dim": 81}, 2, 96, "ffn_dim 81"),
        ({"vocab_size": 5}, 4, 32, "vocab_size 5"),
        ({}, 1, 0, "seq_length is 0"),
    ],
)
def test_a_model_that_does_not_fit_the_mesh(config, tp, seq, message):
    with pytest.raises(LayoutError, match=message):
        check_sizes(TransformerConfig(**config), Layout(dp_shard=1, tp=tp), seq)


def on_a_device_mesh(rank):
    """The layout that `Mesh` reads from a mesh of PyTorch's own, and the shards of a model that is applied to it."""
    device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    with meta_parameters():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plan = Plan(tensor={"0": ColwiseParallel(), "1": RowwiseParallel()}, fsdp_units=("0", "1"))
    materialize(parallelize(model, device_mesh, plan, Precision("fp64", torch.float64, torch.float64)), CPU, 0)
    return Mesh.of(device_mesh).layout, {name: tuple(to_local(p).shape) for name, p in model.named_parameters()}


def test_a_mesh_of_pytorchs_own(run_on_ranks):
    shapes = {"0.weight": (3, 4), "0.bias": (3,), "1.weight": (4, 3), "1.bias": (4,)}
    assert run_on_ranks(on_a_device_mesh, 2) == [(Layout(dp_shard=1, tp=2), shapes)] * 2


def refused_names(rank, names):
    try:
        Mesh.of(init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names))
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize("names", [("dp",), ("tp", "dp_shard"), ("tp",)])
def test_other_axes_are_refused(run_on_ranks, names):
    (message,) = run_on_ranks(refused_names, 1, names)
    assert message.startswith(f"a mesh with axes {', '.join(names)}: name them, in this order, pp, dp_replicate, dp_sh")


@pytest.mark.parametrize("pp", range(2, 10))
def test_rounds_have_each_pair_once(pp):
    rounds = neighbour_rounds(pp)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "a rank is in two groups of a round"
    exchanged = sorted(frozenset(pair) for pairs in rounds for pair in pairs)
    assert len(exchanged) == len(set(exchanged))
    assert set(exchanged) == {frozenset((coordinate, (coordinate + 1) % pp)) for coordinate in range(pp)}
    assert len(rounds) == (1 if pp == 2 else 2 + pp % 2)


def test_stated_algorithms():
    """No rank sends more than the factor says, and all together move what has to be moved."""
    n, global_batch = 4, 4800

    def sent(operation: str, **more) -> list[float]:
        return [Call(operation, n, rank, global_batch, root=1, **more).sent() for rank in range(n)]

    assert sent("all_reduce") == [7200.0] * n
    assert sent("all_gather") == sent("reduce_scatter") == [3600.0] * n
    # The chain 1 2 3 0.
    assert sent("broadcast") == [0.0, 4800.0, 4800.0, 4800.0]
    assert sent("reduce") == [4800.0, 0.0, 4800.0, 4800.0]
    assert sent("all_to_all", leaving=3600) == [3600.0] * n
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        assert max(sent(operation)) == factor(operation, n) * global_batch
        assert Call(operation, 1, 0, global_batch).sent() == 0


@pytest.mark.parametrize(
    ("n_kv_heads", "tp", "ulysses", "heads"),
    [
        # Tp shards them
        (8, 2, 1, 4),
        # More tp ranks than heads: two ranks have the same one.
        (2, 4, 1, 1),
        # And it is repeated for Ulysses.
        (2, 4, 2, 2),
        (6, 1, 4, 12),
    ],
)
def test_key_value_heads_that_travel_over_cp(n_kv_heads, tp, ulysses, heads):
    assert heads_over_cp(n_kv_heads, tp, ulysses) == heads
