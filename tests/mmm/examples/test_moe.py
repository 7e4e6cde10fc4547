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
@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (["--ep", "2"], "dp4·ep2"),
        (["--ep", "2", "--tp", "2"], "dp2·tp2·ep2"),
    ],
)
def test_same_losses_as_on_one_device(run_on_ranks, tmp_path, flags, layout):
    sizes = {"seq_length": 32, "global_batch_size": 8, "eval_batches": 1, "max_iters": 4, "dtype": "fp64"}
    arguments = [*flags, "--no-plots", "--outdir", str(tmp_path / "four")]
    for name, value in sizes.items():
        arguments += [f"--{name}", str(value)]
    done = run_program(run_on_ranks, 4, "mmm.examples.moe", *arguments)
    assert done.returncode == 0, done.stderr
    assert f"layout {layout}" in done.stdout
    assert "dim 0 over ep, then expert_dp" in done.stdout
    assert "Warning" not in done.stderr
    train(configure(Config, **sizes, outdir=tmp_path / "one", plots=False))
    one = mmm.history.load(tmp_path / "one")
    four = mmm.history.load(tmp_path / "four")
    np.testing.assert_allclose(one.loss, four.loss, rtol=1e-9)
    np.testing.assert_allclose(one.val_loss, four.val_loss, rtol=1e-9)
    assert one.imbalance.values.tolist() == four.imbalance.values.tolist()


@pytest.mark.parametrize(
    ("ranks", "tp", "ep"),
    [
        (1, 1, 1),
        # Two ranks of ep would not divide three.
        (3, 1, 1),
        (4, 1, 2),
        (4, 2, 2),
        # tp has all ranks.
        (4, 4, 1),
    ],
)
def test_ranks_of_the_default(ranks, tp, ep):
    assert configure(Config, tpsize=tp).layout(ranks).ep == ep


def sent_in_a_step(rank):
    """Bytes by axis, of the sizes and the layout that the example's docstring counts."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(sizes_of(Config().model))
    layout = Layout(ep=2).fit(rank.world_size)
    mesh = build_mesh(layout, "cpu", experts=True)
    parallelize(model, mesh, transformer_plan(), Precision("fp32", torch.float32, torch.float32))
    materialize(model, torch.device("cpu"), 0)
    # 4 samples of 128 tokens on each of 4 ranks: 2,048 tokens in all.
    inputs, targets = torch.randint(256, (2, 4, 128))
    with count_traffic(mesh) as traffic:
        logits = model(inputs)
        cross_entropy(logits, targets, 2048).backward()
    return traffic.by_axis


def test_what_rank_1_sends_is_what_the_docstring_says(run_on_ranks):
    _, sent, *_ = run_on_ranks(sent_in_a_step, 4)
    for size in ("983 kB", "235 kB", "66 kB"):
        assert size in moe.__doc__
    # 4 of 8 experts of 3 × 64 × 160 float32, in 2 layers: gathered twice and scattered once, over two ranks.
    experts = 3 * 983_040
    assert sent["expert_dp"] == 1 / 2 * experts
    # The rest likewise, over four ranks; 66 kB of it are gathered only once.
    others = 3 * 235_000 - 66_000
    assert sent["dp_shard"] == pytest.approx(3 / 4 * others, rel=0.002)
    # As the router chooses.
    assert sent["ep"] == pytest.approx(4 * 253_000, rel=0.1)


def layers(rank, top_k):
    """Output and gradients of a rank's tokens by hand over the ranks, and of the model's layer on one device."""
    torch.manual_seed(0)
    # 16 channels, 24 in an expert, 4 experts.
    layer = MixtureOfExperts(16, 24, 4, top_k).double()
    # (ranks, tokens, channels)
    x, dy = torch.randn(2, rank.world_size, 10, 16, dtype=torch.float64)
    x.requires_grad_()
    router = layer.router.weight
    experts = [layer.experts.w1, layer.experts.w2, layer.experts.w3]
    inputs = (x, router, *experts)
    local_experts = [w.chunk(rank.world_size)[rank.rank] for w in experts]
    y = moe_layer(x[rank.rank], router, local_experts, top_k, torch.distributed.group.WORLD)
    by_hand = [y, *torch.autograd.grad(y, inputs, dy[rank.rank])]
    output = layer(x)
    on_one = [output[rank.rank], *torch.autograd.grad(output, inputs, dy)]
    # The same by hand on one device, each expert over all tokens.
    dense = dense_experts(x.flatten(0, 1), router, experts, top_k)
    beside = dense.view_as(x)[rank.rank]
    return [[t.detach() for t in tensors] for tensors in (by_hand, on_one, [beside])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layer_by_hand_is_the_models(run_on_ranks, ranks):
    everyone = run_on_ranks(layers, ranks, 2)
    gradients_by_rank = []
    for (output, *gradients), (expected, *_), (beside,) in everyone:
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(beside, expected, rtol=1e-9, atol=1e-12)
        gradients_by_rank.append(gradients)
    # A rank has its tokens' part of each gradient. What one device has is the same on each rank.
    _, (_, *expected_gradients), _ = everyone[0]
    for parts, wanted in zip(zip(*gradients_by_rank, strict=True), expected_gradients, strict=True):
        torch.testing.assert_close(sum(parts), wanted, rtol=1e-9, atol=1e-12)
