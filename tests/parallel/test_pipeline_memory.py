"""Pipelines together with what repeats or divides the work of a stage: checkpointing, tiles, the loss in chunks."""

import pytest
import torch

from mmm.errors import LayoutError
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, build_mesh
from mmm.parallel.assemble import ParallelModel, Techniques, divide
from mmm.parallel.expert import balance_experts
from mmm.parallel.pipeline import SCHEDULES
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from support import reference

CPU = torch.device("cpu")
FP64 = Precision("fp64", torch.float64, torch.float64)
SPLIT = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits)
MODELS = {
    "dense": reference.CONFIG,
    "experts": TransformerConfig(dim=32, n_heads=4, n_kv_heads=2, n_layers=2, vocab_size=256,
                                 n_experts=4, expert_dim=24),
}
LAYOUT = Layout(pp=2, dp_shard=1)


def techniques(schedule, **memory):
    return Techniques(schedule=schedule, microbatches=4, **memory)


def train(rank, model, memory):
    """By each schedule the losses of 3 steps, the gradients of the first, and its loads by layer."""
    return {schedule: train_one(rank, MODELS[model], techniques(schedule, **memory)) for schedule in SPLIT}


def train_one(rank, config, how):
    mesh, plan = build_mesh(LAYOUT, "cpu", 30, experts=config.n_experts > 0), transformer_plan()
    with torch.device("meta"):
        model, sample = Transformer(config), torch.zeros(reference.GLOBAL_BATCH, reference.SEQ, dtype=torch.int64)
    made = ParallelModel(model, plan, LAYOUT, mesh, FP64, how, divide(model, plan, LAYOUT, how, sample), device=CPU,
                         seed=reference.SEED)  # fmt: skip
    optimizer, losses = torch.optim.SGD(made.parameters(), lr=reference.RATE["sgd"], foreach=False), []
    for step in range(3):
        batch = reference.tokens().batch(step, reference.GLOBAL_BATCH, 0, reference.GLOBAL_BATCH)
        losses.append(made.step(batch.inputs, batch.targets, batch.count).item())
        if step == 0:
            first = {name: p.grad.full_tensor().clone() for name, p in made.named_parameters()}
            load = balance_experts(made.modules.values(), mesh, 0.0).sum(1).tolist()
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, load


@pytest.mark.parametrize(
    ("model", "memory"),
    [
        pytest.param("experts", {"checkpointing": "full"}, marks=pytest.mark.long),
        ("dense", {"checkpointing": "full"}),
        pytest.param("dense", {"tile": 3}, marks=pytest.mark.long),
        pytest.param("dense", {"loss_chunks": 3}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_schedules_that_split_backward(pool, model, memory):
    losses, gradients = reference.train("sgd", torch.float64, 3, MODELS[model])
    ranks = pool.run(train, 2, model, memory, timeout=120)
    for schedule in SPLIT:
        names = set()
        for of_rank in ranks:
            got, first, load = of_rank[schedule]
            assert got == pytest.approx(losses, rel=1e-9), schedule
            names |= first.keys()
            for name, gradient in first.items():
                off = ((gradient - gradients[name]).abs().max() / gradients[name].abs().max()).item()
                assert off <= 1e-8, f"{schedule}: gradient of {name} differs by {off:.2e} of its largest element"
            # Each token is counted once for each of its 2 experts, however often its forward is repeated.
            assert all(n == 2 * reference.GLOBAL_BATCH * reference.SEQ for n in load)
        assert names == gradients.keys()


@pytest.mark.parametrize("schedule", SPLIT)
def test_selective_checkpointing_is_refused_where_backward_is_split(schedule):
    with torch.device("meta"):
        model, sample = Transformer(reference.CONFIG), torch.zeros(8, reference.SEQ, dtype=torch.int64)
    with pytest.raises(LayoutError, match=rf"selective with {schedule}, .* use full .* or 1F1B"):
        divide(model, transformer_plan(), LAYOUT, techniques(schedule, checkpointing="selective"), sample)


@pytest.mark.parametrize(
    "schedule",
    ["1F1B", *(pytest.param(name, marks=pytest.mark.long) for name in SCHEDULES if name not in (*SPLIT, "1F1B"))],
)
def test_selective_checkpointing(pool, schedule):
    losses, _ = reference.train("sgd", torch.float64, 3, MODELS["dense"])
    for got, _, _ in pool.run(train_one, 2, MODELS["dense"], techniques(schedule, checkpointing="selective")):
        assert got == pytest.approx(losses, rel=1e-9)
