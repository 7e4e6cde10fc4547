"""Experts sharded over ranks: losses, every gradient, loads and biases as in plain PyTorch on one process."""

import math
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import LayoutError
from mmm.layout import check_data_parallel
from mmm.models.cnn.plan import cnn_plan
from mmm.models.definition import check_sizes
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn import weights
from mmm.nn.init import canonical_name
from mmm.parallel import (
    Layout,
    balance_experts,
    build_mesh,
    clip_grad_norm,
    cross_entropy,
    imbalance,
    materialize,
    parallelize,
)
from mmm.parallel.ep.expert_parallel import apply_expert_parallel
from mmm.parallel.local import detached, unsharded
from mmm.runtime.process_group import gather_floats
from support import reference
from support.own_model import FP64
from support.shards import shard_batch

CPU = torch.device("cpu")
STEPS = 10
# Eight experts a layer.
CONFIG = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256, n_experts=8, expert_dim=24)
# Twenty times the usual: in ten steps many a token changes its experts.
BALANCE = 0.02
# Biases of experts that then get no token: with ep 4 a whole rank's.
NOBODY = {6: -10.0, 7: -10.0}
RATE = 0.5


def set_biases(model, biases):
    for layer in model.layers.values():
        for expert, value in biases.items():
            layer.moe.expert_bias[expert] = value


@lru_cache
def reference_run(steps=STEPS, biases=(), config=CONFIG):
    """Plain PyTorch; loads and biases worked out here, from the scores alone."""
    model = Transformer(config).double()
    weights.initialize(model, reference.SEED)
    set_biases(model, dict(biases))
    layers = [layer.moe for layer in model.layers.values()]
    scores = {}
    for moe in layers:
        moe.router.register_forward_hook(lambda module, _, out: scores.update({module: out.detach()}))
    step_of = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, first, loads = [], {}, []
    for step in range(steps):
        batch = reference.tokens().batch(step, reference.GLOBAL_BATCH, 0, reference.GLOBAL_BATCH)
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        step_of.step()
        step_of.zero_grad()
        losses.append(loss.item())
        chosen = [(scores[moe.router] + moe.expert_bias).topk(config.top_k).indices.flatten() for moe in layers]
        counts = [torch.bincount(choices, minlength=config.n_experts).tolist() for choices in chosen]
        for moe, count in zip(layers, counts, strict=True):
            mean = sum(count) / len(count)
            for expert, load in enumerate(count):
                # Up for the experts with fewer tokens than the mean, down for those with more.
                moe.expert_bias[expert] += BALANCE * ((load < mean) - (load > mean))
        loads.append(counts)
    return losses, first, loads, [moe.expert_bias.tolist() for moe in layers]


def train(rank, layout, steps, biases, config, techniques):
    """Losses of each step, whole gradients of the first and their norm, loads of each step, biases at the end."""
    mesh = build_mesh(layout, "cpu", experts=True)
    assert mesh.layout == layout
    with torch.device("meta"):
        model = Transformer(config)
    model = parallelize(model, mesh, transformer_plan(), FP64, **techniques)
    materialize(model, CPU, reference.SEED)
    inner = getattr(model, "module", model)
    set_biases(inner, dict(biases))
    step_of = torch.optim.SGD(model.parameters(), lr=RATE)
    size = reference.GLOBAL_BATCH // layout.dp
    losses = []
    first = {}
    norm = math.nan
    loads = []
    for step in range(steps):
        samples = reference.tokens().batch(step, reference.GLOBAL_BATCH, layout.dp_coordinate(rank.rank) * size, size)
        shard, positions = shard_batch(samples, layout.coordinates(rank.rank)["cp"], layout.cp)
        with loss_parallel():
            loss = cross_entropy(model(shard.inputs, positions), shard.targets, shard.count)
            loss.backward()
        if step == 0:
            gradients = {canonical_name(name): p.grad for name, p in model.named_parameters()}
            first = {name: unsharded(g).clone() for name, g in gradients.items()}
            # Only measured: nothing is clipped.
            norm = float(clip_grad_norm(model.parameters(), math.inf))
        step_of.step()
        step_of.zero_grad()
        loads.append(balance_experts(model, mesh, BALANCE).tolist())
        shares = gather_floats([detached(loss).item()], CPU)
        losses.append(sum(shares[r][0] for r in layout.loss_ranks()))
    return losses, first, norm, loads, [layer.moe.expert_bias.tolist() for layer in inner.layers.values()]


def assert_same(got, expected):
    losses, gradients, norm, loads, biases = got
    right_losses, right, right_loads, right_biases = expected
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, right_losses, strict=True))
    assert worst <= 1e-9, f"losses differ by {worst:.2e}: {losses} instead of {right_losses}"
    for name, gradient in gradients.items():
        off = ((gradient - right[name]).abs().max() / right[name].abs().max()).item()
        assert off <= 1e-8, f"gradient of {name} differs by {off:.2e} of its largest element"
    full_norm = math.sqrt(sum(float(g.square().sum()) for g in right.values()))
    assert norm == pytest.approx(full_norm, rel=1e-9), "norms differ"
    assert gradients.keys() == right.keys()
    assert loads == right_loads, "loads differ"
    assert biases == right_biases, "biases differ"


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        (Layout(dp_shard=2, cp=2, ep=2), 2),
        pytest.param(Layout(dp_shard=4, ep=2), STEPS, marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2, tp=2, ep=2), STEPS, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_same_as_whole(run_on_ranks, layout, steps):
    """Loads and biases too; `tests/mmm_lab/parity/test_matrix.py` has the other layouts."""
    expected = check(run_on_ranks, layout, steps)
    # Routing does change.
    assert len({tuple(load) for step in expected[2] for load in step}) > steps


def check(run_on_ranks, layout, steps, biases=(), config=CONFIG, **techniques):
    expected = reference_run(steps, biases, config)
    for got in run_on_ranks(train, layout.ranks, layout, steps, biases, config, techniques):
        assert_same(got, expected)
    return expected


@pytest.mark.long
@pytest.mark.parametrize("technique", ["ddp", "zero1", "zero2"])
def test_whole_copies(run_on_ranks, technique):
    check(run_on_ranks, Layout(dp_shard=2), 3, data_parallel=technique)


def test_a_rank_whose_experts_get_no_token(run_on_ranks):
    expected = check(run_on_ranks, Layout(dp_shard=4, ep=4), 3, biases=tuple(NOBODY.items()))
    assert all(load[6:] == [0, 0] for step in expected[2] for load in step)


@pytest.mark.parametrize("n_experts", [6, pytest.param(2, marks=pytest.mark.long)])
def test_experts_that_their_ranks_do_not_divide(run_on_ranks, n_experts):
    """3 experts, or 1, a rank, which 2 ranks shard: w2 by its rows; w1 and w3 have 23, and go by the expert."""
    config = TransformerConfig(**{**vars(CONFIG), "n_experts": n_experts, "expert_dim": 23})
    check(run_on_ranks, Layout(dp_shard=4, ep=2), 2, config=config)


def saved(rank, layout, config):
    with torch.device("meta"):
        model = Transformer(config)
    parallelize(model, build_mesh(layout, "cpu", experts=True), transformer_plan(), FP64)
    materialize(model, CPU, reference.SEED)
    return {name: unsharded(tensor) for name, tensor in get_model_state_dict(model).items()}


@pytest.mark.parametrize("layout", [Layout(dp_shard=4, ep=2), Layout(dp_shard=2, tp=2, ep=2)], ids=str)
def test_initial_weights_and_what_is_saved(run_on_ranks, layout):
    """Drawn by part, put together again: the very numbers of the model on one process, and its biases."""
    config = TransformerConfig(**{**vars(CONFIG), "n_experts": 6, "expert_dim": 23})
    expected = Transformer(config).double()
    weights.initialize(expected, reference.SEED)
    got = run_on_ranks(saved, 4, layout, config)[0]
    assert got.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(got[name], tensor)


# ---- the mesh, and what is refused


def groups(rank, layout):
    mesh = build_mesh(layout, "cpu", experts=True).experts
    return {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in mesh.mesh_dim_names}


@pytest.mark.parametrize(
    ("layout", "ep", "expert_dp"),
    [
        (Layout(dp_shard=4, ep=2), [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (Layout(dp_shard=2, cp=2, ep=2), [[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (Layout(pp=2, dp_shard=2, ep=2), [[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [1], [2], [3]]),
        (Layout(dp_shard=2, tp=2), None, [[0, 1, 2, 3]] * 4),
    ],
    ids=str,
)
def test_groups(run_on_ranks, layout, ep, expert_dp):
    got = run_on_ranks(groups, 4, layout)
    assert [sizes["expert_dp"] for sizes in got] == expert_dp
    assert [sizes.get("ep") for sizes in got] == (ep or [None] * 4)


def test_layouts():
    layout = Layout(ep=2).fit(4)
    assert (str(layout), layout.ranks, layout.dp) == ("dp4·ep2", 4, 4)
    assert str(Layout(pp=2, dp_replicate=2, ep=2).fit(8)) == "pp2·dp_replicate2·dp_shard2·ep2"
    assert "ep" not in layout.sizes
    for wrong, ranks, message in (
        (Layout(ep=3), 4, "ep 3 does not divide dp_shard 4 "),
        (Layout(tp=2, ep=4), 4, "ep 4 does not divide dp_shard 2 "),
        (Layout(ep=0), 4, "ep 0: it is at least 1"),
    ):
        with pytest.raises(LayoutError, match=message):
            wrong.fit(ranks)


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"n_experts": 0}, Layout(dp_shard=2, ep=2), "n_experts"),
        ({"n_experts": 6}, Layout(dp_shard=4, ep=4), "n_experts 6"),
        ({"top_k": 9}, Layout(dp_shard=1), "top_k is 9"),
    ],
)
def test_a_model_that_does_not_fit(changes, layout, message):
    with pytest.raises(LayoutError, match=message):
        check_sizes(TransformerConfig(**{**vars(CONFIG), **changes}), layout, reference.SEQ)


def test_experts_need_no_ffn_dim_that_tp_divides():
    check_sizes(TransformerConfig(**{**vars(CONFIG), "ffn_dim": 81}), Layout(dp_shard=1, tp=2), reference.SEQ)


def test_whole_copies_with_ep_are_refused():
    with pytest.raises(LayoutError, match=r"ddp keeps the full model .*, which does not go with ep 2"):
        check_data_parallel("ddp", Layout(dp_shard=2, ep=2))


def refused(rank):
    with torch.device("meta"):
        model = Transformer(CONFIG)
    with pytest.raises(LayoutError, match=r"tp 2: a mesh for a model with experts .* build_mesh\(…, experts=True"):
        apply_expert_parallel(model, build_mesh(Layout(dp_shard=1, tp=2), "cpu"), transformer_plan())
    with pytest.raises(LayoutError, match="ep 2: the plan of this model names no experts"):
        apply_expert_parallel(model, build_mesh(Layout(dp_shard=2, ep=2), "cpu"), cnn_plan())


def test_refused_on_a_mesh(run_on_ranks):
    run_on_ranks(refused, 2)


def test_a_dense_model_has_nothing_to_balance():
    dense = Transformer(TransformerConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=16))
    assert balance_experts(dense, None).shape == (0, 0)  # type: ignore[arg-type]
    assert math.isnan(imbalance(torch.zeros(0, 0)))
    assert math.isnan(imbalance(torch.zeros(2, 4)))
    assert imbalance(torch.tensor([[1, 1, 1, 1], [6, 1, 1, 0]])) == 3.0
