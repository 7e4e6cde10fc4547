"""The same loss, and the same gradient of every parameter, on every mesh as in plain PyTorch on one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.models.draw import canonical_name
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, apply, build_mesh, cross_entropy, materialize
from mmm.parallel.local import detached
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats
from support import reference

STEPS = 10
CPU = torch.device("cpu")


def build(layout: Layout, dtype: torch.dtype, config: TransformerConfig) -> nn.Module:
    mesh = build_mesh(layout, "cpu")
    with torch.device("meta"):
        model = Transformer(config)
    apply(model, mesh, transformer_plan(), Precision("test", dtype, dtype))
    materialize(model, CPU, reference.SEED)
    return model


def train(rank, layout: Layout, runs: list[tuple[str, torch.dtype]], config: TransformerConfig):
    """For each (optimizer, dtype): losses of each step, and the whole gradients of the first."""
    return [train_one(rank, layout, optimizer, dtype, config) for optimizer, dtype in runs]


def train_one(rank, layout: Layout, optimizer: str, dtype: torch.dtype, config: TransformerConfig):
    model = build(layout, dtype, config)
    step_of = reference.optimizer_of(optimizer, model)
    size = reference.GLOBAL_BATCH // layout.dp
    mine = layout.dp_coordinate(rank.rank) * size
    losses, first = [], {}
    for step in range(STEPS):
        batch = reference.tokens().batch(step, reference.GLOBAL_BATCH, mine, size)
        with loss_parallel():
            loss = cross_entropy(model(batch.inputs), batch.targets, batch.count)
            loss.backward()
        if step == 0:
            first = {canonical_name(name): p.grad.full_tensor() for name, p in model.named_parameters()}
        step_of.step()
        step_of.zero_grad()
        shares = gather_floats([detached(loss).item()], CPU)
        losses.append(sum(shares[r][0] for r in layout.loss_ranks()))
    return losses, first


def assert_same(got, expected, loss_bound: float, gradient_bound: float) -> None:
    losses, gradients = got
    expected_losses, expected_gradients = expected
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
    assert worst <= loss_bound, f"losses differ by {worst:.2e}: {losses} instead of {expected_losses}"
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        off = ((gradients[name] - gradient).abs().max() / gradient.abs().max()).item()
        assert off <= gradient_bound, f"gradient of {name} differs by {off:.2e} of its largest element"


LAYOUTS = [Layout(dp_shard=dp, tp=tp) for dp, tp in [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]]
LAYOUTS.append(Layout(dp_replicate=2, dp_shard=2))
REST = [*LAYOUTS[1:5], LAYOUTS[6]]


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], LAYOUTS[5], *(pytest.param(layout, marks=pytest.mark.long) for layout in REST)], ids=str
)
def test_ten_steps(run_on_ranks, layout):
    """AdamW hides a gradient of the wrong size, SGD shows it."""
    runs = [("sgd", torch.float64), ("adamw", torch.float64)]
    for results in run_on_ranks(train, layout.ranks, layout, runs, reference.CONFIG):
        for (optimizer, dtype), got in zip(runs, results, strict=True):
            assert_same(got, reference.train(optimizer, dtype, STEPS), 1e-9, 1e-8)


@pytest.mark.parametrize(
    "layout", [LAYOUTS[1], *(pytest.param(layout, marks=pytest.mark.long) for layout in LAYOUTS[2:6])], ids=str
)
def test_ten_steps_in_float32(run_on_ranks, layout):
    runs = [("sgd", torch.float32), ("adamw", torch.float32)]
    for (optimizer, dtype), got in zip(
        runs, run_on_ranks(train, layout.ranks, layout, runs, reference.CONFIG)[0], strict=True
    ):
        assert_same(got, reference.train(optimizer, dtype, STEPS), 1e-4, 1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[5], LAYOUTS[2], LAYOUTS[4]],
    ids=str,
)
def test_vocabulary_that_no_rank_count_divides(run_on_ranks, layout):
    config = TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=48, vocab_size=259)
    expected = reference.train("sgd", torch.float64, STEPS, config)
    got = run_on_ranks(train, layout.ranks, layout, [("sgd", torch.float64)], config)[0][0]
    assert_same(got, expected, 1e-9, 1e-8)


def lost_reduction(rank, layout):
    """A planted bug: FSDP averages where it should add up."""
    original = torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor
    torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor = lambda self, factor: original(self, 2.0)
    try:
        return train_one(rank, layout, "adamw", torch.float64, reference.CONFIG)
    finally:
        torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor = original


def same_data(rank, layout):
    """A planted bug: every data-parallel coordinate reads the same samples."""
    original = Layout.dp_coordinate
    Layout.dp_coordinate = lambda self, rank: 0
    try:
        return train_one(rank, layout, "sgd", torch.float64, reference.CONFIG)
    finally:
        Layout.dp_coordinate = original


@pytest.mark.parametrize(("planted", "optimizer"), [(lost_reduction, "adamw"), (same_data, "sgd")])
def test_planted_bugs_are_caught(run_on_ranks, planted, optimizer):
    got = run_on_ranks(planted, 2, Layout(dp_shard=2))[0]
    with pytest.raises(AssertionError, match="differ"):
        assert_same(got, reference.train(optimizer, torch.float64, STEPS), 1e-9, 1e-8)
