"""Pipelines together with what repeats or divides the work of a stage: checkpointing, tiles, the loss in chunks."""

import pytest
import torch

from mmm.errors import LayoutError
from mmm.layout import Techniques
from mmm.models.experts import transformer_of
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, build_mesh
from mmm.parallel.ep.balance import balance_experts
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.runtime.device import Precision
from support import reference, vision
from support.clock import PATIENCE

CPU = torch.device("cpu")
FP64 = Precision("fp64", torch.float64, torch.float64)
BF16 = Precision("bf16", torch.float32, torch.bfloat16)
SPLIT = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits)
MODELS = {
    "dense": reference.CONFIG,
    "experts": TransformerConfig(
        dim=32, n_heads=4, n_kv_heads=2, n_layers=2, vocab_size=256, n_experts=4, expert_dim=24
    ),
}
LAYOUT = Layout(pp=2, dp_shard=1)


def techniques(schedule, **memory):
    return Techniques(schedule=schedule, microbatches=4, **memory)


def train(rank, model, memory):
    """By each schedule the losses of 3 steps, the gradients of the first, and its loads by layer."""
    return {schedule: train_one(rank, MODELS[model], techniques(schedule, **memory)) for schedule in SPLIT}


def train_one(rank, config, techniques):
    mesh, plan = build_mesh(LAYOUT, "cpu", experts=config.n_experts > 0), transformer_plan()
    with torch.device("meta"):
        model, sample = transformer_of(config), torch.zeros(reference.GLOBAL_BATCH, reference.SEQ, dtype=torch.int64)
    made = ParallelModel(
        model,
        plan,
        mesh,
        FP64,
        techniques,
        partition_model(model, plan, LAYOUT, techniques, sample),
        device=CPU,
        seed=reference.SEED,
    )
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "memory"),
    [
        ("experts", {"checkpointing": "full"}),
        ("dense", {"checkpointing": "full"}),
        ("dense", {"tile": 3}),
        ("dense", {"loss_chunks": 3}),
    ],
    ids=str,
)
def test_schedules_that_split_backward(run_on_ranks, model, memory):
    losses, gradients = reference.train("sgd", torch.float64, 3, MODELS[model])
    ranks = run_on_ranks(train, 2, model, memory, timeout=PATIENCE)
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
        partition_model(model, transformer_plan(), LAYOUT, techniques(schedule, checkpointing="selective"), sample)


@pytest.mark.parametrize(
    "schedule",
    ["1F1B", *(pytest.param(name, marks=pytest.mark.long) for name in SCHEDULES if name not in (*SPLIT, "1F1B"))],
)
def test_selective_checkpointing(run_on_ranks, schedule):
    losses, _ = reference.train("sgd", torch.float64, 3, MODELS["dense"])
    for got, _, _ in run_on_ranks(train_one, 2, MODELS["dense"], techniques(schedule, checkpointing="selective")):
        assert got == pytest.approx(losses, rel=1e-9)


def first_gradients(rank, schedule):
    """Of one step of the ViT in bf16 mixed precision, as one micro-batch where the schedule takes that."""
    layout, plan = Layout(pp=2, dp_shard=2), vit_plan()
    techniques = Techniques(schedule=schedule)
    images, classes = vision.batch("vit", 0)
    size = len(images) // layout.dp
    first = layout.dp_coordinate(rank.rank) * size
    images, classes = images[first : first + size].float(), classes[first : first + size]
    with torch.device("meta"):
        model = vision.build("vit")
    partition = partition_model(model, plan, layout, techniques, images.to("meta"))
    made = ParallelModel(
        model, plan, build_mesh(layout, "cpu"), BF16, techniques, partition, device=CPU, seed=vision.SEED
    )
    made.step(images, classes, vision.GLOBAL_BATCH)
    return {name: parameter.grad.full_tensor() for name, parameter in made.named_parameters()}


def test_gradients_of_a_split_backward_are_summed_in_one_dtype(run_on_ranks):
    """In mixed precision over dp, whichever of a unit's gradients come with the input's and which come later."""
    _, _, gradients = vision.train("vit", "sgd")
    ranks = run_on_ranks(first_gradients, 4, "ZBVZeroBubble")
    assert {name for of_rank in ranks for name in of_rank} == gradients.keys()
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in ((name, each) for of_rank in ranks for name, each in of_rank.items()):
        assert gradient.dtype == torch.float32
        off = ((gradient - gradients[name]).norm() / max(gradients[name].norm(), 1e-3 * largest)).item()
        assert off < 0.05, f"the gradient of {name} is {off:.1%} off"
