"""The example as a user runs it."""

import numpy as np
import pytest
import torch

import mmm.history
from mmm.examples import moe
from mmm.examples._support import sizes_of
from mmm.examples._support.by_hand import dense_experts
from mmm.examples.moe import Config, moe_layer, train
from mmm.models.llama.model import Transformer
from mmm.models.llama.plan import transformer_plan
from mmm.nn.experts import MixtureOfExperts
from mmm.parallel import Layout, build_mesh, cross_entropy, materialize, parallelize
from mmm.run.command_line import configure
from mmm.runtime.device import Precision
from mmm.traffic.count import count_traffic
from support.programs import run_program


@pytest.mark.long
@pytest.mark.parametrize(("flags", "layout"), [(["--ep", "2"], "dp4·ep2"), (["--ep", "2", "--tp", "2"], "dp2·tp2·ep2")])
def test_same_losses_as_on_one_device(run_on_ranks, tmp_path, flags, layout):
    flags += ["--seq_length", "32", "--global_batch_size", "8", "--eval_batches", "1", "--dtype", "fp64"]
    flags += ["--max_iters", "4", "--no-plots", "--outdir", str(tmp_path / "four")]
    done = run_program(run_on_ranks, 4, "mmm.examples.moe", *flags)
    assert done.returncode == 0, done.stderr
    assert f"layout {layout}" in done.stdout
    assert "dim 0 over ep, then expert_dp" in done.stdout
    assert "Warning" not in done.stderr
    sizes = {"seq_length": 32, "global_batch_size": 8, "eval_batches": 1}
    train(configure(Config, **sizes, outdir=tmp_path / "one", max_iters=4, dtype="fp64", plots=False))
    one, four = (mmm.history.load(tmp_path / name) for name in ("one", "four"))
    np.testing.assert_allclose(one.loss, four.loss, rtol=1e-9)
    np.testing.assert_allclose(one.val_loss, four.val_loss, rtol=1e-9)
    assert one.imbalance.values.tolist() == four.imbalance.values.tolist()


def test_ranks_of_the_default():
    sizes = {
        (ranks, tp): configure(Config, tpsize=tp).layout(ranks).ep
        for ranks, tp in [(1, 1), (3, 1), (4, 1), (4, 2), (4, 4)]
    }
    assert sizes == {(1, 1): 1, (3, 1): 1, (4, 1): 2, (4, 2): 2, (4, 4): 1}


def sent_in_a_step(rank):
    """Bytes by axis, of the sizes and the layout that the example's docstring counts."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(sizes_of(Config().model))
    layout = Layout(ep=2).fit(rank.world_size)
    mesh = build_mesh(layout, "cpu", experts=True)
    parallelize(model, mesh, transformer_plan(), Precision("fp32", torch.float32, torch.float32))
    materialize(model, torch.device("cpu"), 0)
    inputs, targets = torch.randint(256, (2, 4, 128))
    with count_traffic(mesh) as traffic:
        cross_entropy(model(inputs), targets, 4 * 512).backward()
    return traffic.by_axis


def test_what_rank_1_sends_is_what_the_docstring_says(run_on_ranks):
    sent = run_on_ranks(sent_in_a_step, 4)[1]
    assert "983 kB" in moe.__doc__
    # 4 of 8 experts of 3 × 64 × 160 float32, in 2 layers.
    assert sent["expert_dp"] == 3 * 1 / 2 * 983_040
    assert "235 kB" in moe.__doc__
    assert "66 kB" in moe.__doc__
    assert sent["dp_shard"] == pytest.approx(3 / 4 * (3 * 235_000 - 66_000), rel=0.002)
    # As the router chooses.
    assert sent["ep"] == pytest.approx(4 * 253_000, rel=0.1)


def layers(rank, top_k):
    """Output and gradients of a rank's tokens by hand over the ranks, and of the model's layer on one device."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 24, 4, top_k).double()
    x, dy = torch.randn(2, rank.world_size, 10, 16, dtype=torch.float64)
    x.requires_grad_()
    router, (w1, w2, w3) = layer.router.weight, (layer.experts.w1, layer.experts.w2, layer.experts.w3)
    local_experts = [w.chunk(rank.world_size)[rank.rank] for w in (w1, w2, w3)]
    y = moe_layer(x[rank.rank], router, local_experts, top_k, torch.distributed.group.WORLD)
    by_hand = [y, *torch.autograd.grad(y, (x, router, w1, w2, w3), dy[rank.rank])]
    output = layer(x)
    on_one = [output[rank.rank], *torch.autograd.grad(output, (x, router, w1, w2, w3), dy)]
    beside = dense_experts(x.flatten(0, 1), router, [w1, w2, w3], top_k).view_as(x)[rank.rank]
    return [[t.detach() for t in tensors] for tensors in (by_hand, on_one, [beside])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layer_by_hand_is_the_models(run_on_ranks, ranks):
    everyone = run_on_ranks(layers, ranks, 2)
    for local, on_one, (beside,) in everyone:
        torch.testing.assert_close(local[0], on_one[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(beside, on_one[0], rtol=1e-9, atol=1e-12)
    # Of each gradient, by rank.
    parts = zip(*(local[1:] for local, *_ in everyone), strict=True)
    for by_hand, wanted in zip(parts, everyone[0][1][1:], strict=True):
        torch.testing.assert_close(sum(by_hand), wanted, rtol=1e-9, atol=1e-12)
