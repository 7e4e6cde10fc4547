"""The shared loop: micro-batches, clipping and schedules change nothing that they should not."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mmm.data.images.batches import ImageBatches
from mmm.data.images.datasets import load_images
from mmm.layout import Techniques
from mmm.models import weights
from mmm.models.cnn import CNN, CNNConfig
from mmm.models.experts import MixtureOfExperts, transformer_of
from mmm.models.transformer import TransformerConfig
from mmm.parallel import Layout, build_mesh, cross_entropy
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.clock import StepClock
from mmm.runtime.device import Precision
from mmm.trainer.config.layout import LayoutOptions, techniques_of
from mmm.trainer.config.resolve_plan import resolve_plan
from mmm.trainer.config.run import EvaluationOptions, RunOptions
from mmm.trainer.config.spec import TextData, TrainingSpec
from mmm.trainer.loop.fit import FitConfig, fit
from mmm.trainer.loop.image_task import ImageTask
from mmm.trainer.loop.tasks import TokenTask
from mmm.trainer.run.parallel_model import build_parallel_model
from support import reference as texts
from support.runs import make_run

CONFIG = CNNConfig(image_size=8, width1=4, width2=4, hidden=8).without_dropout()
CPU = torch.device("cpu")
STEPS, BATCH = 6, 12


def train(rank, data_parallel, accumulate, techniques, by_epoch=False):
    """Rows of a run of the loop in float64."""
    options = LayoutOptions(parallel=data_parallel, microbatches=accumulate)
    layout, techniques_there = options.fit(rank.world_size), techniques_of(options)
    precision = Precision("fp64", torch.float64, torch.float64)
    with torch.device("meta"):
        model, sample = CNN(CONFIG), torch.zeros(BATCH // layout.dp, 1, 8, 8)
    data = load_images("digits", image_size=8)
    own = TrainingSpec(
        layout=layout,
        sizes=CONFIG,
        model=model,
        sample=sample,
        data=data,
        steps=STEPS,
        techniques=techniques_there,
        optimizer="sgd",
    )
    resolved = resolve_plan(own, cnn_plan(), "fp64")
    run, kept = make_run(rank, RunOptions(lr=0.1), layout, precision)
    model = build_parallel_model(run, resolved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = ImageTask(run, resolved)
    if by_epoch:
        task.steps_per_epoch = 4
        whole_epoch = task.batches
        task.batches = lambda epoch, first: itertools.islice(whole_epoch(0), 4)
    evaluated = fit(run, model, optimizer, task, FitConfig(steps=STEPS, by_epoch=by_epoch, **techniques))
    return kept.rows, evaluated


def reference(max_norm=0.0, schedule=lambda step: 1.0):
    """The same in plain PyTorch on one process."""
    model = CNN(CONFIG).double()
    weights.initialize(model, 0)
    batches = ImageBatches(load_images("digits", image_size=8).train, BATCH, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = batches.batch(step)
        optimizer.param_groups[0]["lr"] = 0.1 * schedule(step)
        loss = F.cross_entropy(model(batch.images.double()), batch.labels)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def halving(step):
    return 0.5**step


@pytest.mark.parametrize(
    "kind", ["fsdp", "ddp", "zero2", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hsdp", "zero1"))]
)
def test_micro_batches_clipping_and_schedule(run_on_ranks, kind):
    """A step in three uneven micro-batches, clipped hard, at a falling rate, is the step in one."""
    ranks = 4 if kind == "hsdp" else 2
    accumulate = 2 if kind == "hsdp" else 4
    techniques = {"max_norm": 0.05, "schedule": halving, "evaluation": EvaluationOptions(eval_every=3)}
    rows, evaluated = run_on_ranks(train, ranks, kind, accumulate, techniques)[0]
    assert [row["loss"] for row in rows] == pytest.approx(reference(0.05, halving), rel=1e-9)
    assert [row["iter"] for row in rows] == list(range(STEPS))
    assert [row["lr"] for row in rows] == [0.1 * halving(step) for step in range(STEPS)]
    assert ["test_acc" in row for row in rows] == [False, False, True] * 2
    assert evaluated["test_acc"] == rows[-1]["test_acc"]
    assert all(row["dt"] == row["dtd"] + row["dtf"] + row["dtb"] + row["dto"] for row in rows)


def test_one_row_an_epoch(run_on_ranks):
    rows, _ = run_on_ranks(train, 2, "fsdp", None, {}, True)[0]
    losses = reference()
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["lr"] for row in rows] == [0.1, 0.1]
    assert rows[0]["train_loss"] == pytest.approx(sum(losses[:4]) / 4, rel=1e-9)
    assert rows[0]["sps"] == pytest.approx(4 * BATCH / rows[0]["dt"])


EXPERTS = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256, n_experts=4, expert_dim=24)
OVERFLOWS = 1  # the step that does


def biases_by_step(rank, max_norm):
    """Biases of all experts after each of 3 fp16 steps, and the first weights; one rank's gradients overflow in one."""
    layout = Layout(dp_shard=2, ep=2)
    mesh = build_mesh(layout, "cpu", experts=True)
    precision = Precision("fp16", torch.float32, torch.float16)
    with torch.device("meta"):
        model, sample = transformer_of(EXPERTS), torch.zeros(4, texts.SEQ, dtype=torch.int64)
    options, data = RunOptions(lr=0.1, dtype="fp16"), TextData(texts.tokens(), texts.tokens(), {})
    own = TrainingSpec(
        layout=layout,
        sizes=EXPERTS,
        model=model,
        sample=sample,
        data=data,
        steps=3,
        techniques=Techniques(),
        optimizer="adamw",
    )
    resolved = resolve_plan(own, transformer_plan(), "fp16")
    calls = itertools.count()

    def loss(output, targets, count):
        bad = next(calls) == OVERFLOWS and rank.rank == 1
        if bad:
            output.register_hook(lambda gradient: gradient * 1e30)
        return cross_entropy(output, targets, count)

    clock, seen = StepClock(CPU), []
    model = ParallelModel(
        model,
        resolved.plan,
        mesh,
        precision,
        resolved.techniques,
        resolved.partition,
        device=CPU,
        seed=0,
        loss=loss,
        lap=clock.lap,
    )
    run, _ = make_run(rank, options, layout, precision, clock=clock)
    task = TokenTask(run, resolved, eval_batches=1)
    layers = [module for module in model.modules[0].modules() if isinstance(module, MixtureOfExperts)]
    (weight,) = (p for name, p in model.named_parameters() if name == "output.weight")

    record_row = run.row

    def look(*args, **kwargs):
        loss = record_row(*args, **kwargs)
        assert all(layer.tokens_per_expert is None for layer in layers)
        seen.append(([layer.expert_bias.tolist() for layer in layers], weight.full_tensor().detach()))
        return loss

    run.row = look
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    fit(run, model, optimizer, task, FitConfig(steps=3, max_norm=max_norm, balance_rate=0.125))
    return seen


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_a_skipped_step_moves_no_biases(run_on_ranks, max_norm):
    for seen in run_on_ranks(biases_by_step, 2, max_norm):
        (first, before), (second, after), (third, later) = seen
        assert torch.equal(before, after)  # it was skipped
        assert any(bias for layer in first for bias in layer)
        assert second == first
        assert third != second
        assert not torch.equal(later, after)
