"""The shared loop: micro-batches, clipping and schedules change nothing that they should not."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mmm.data.images.batches import ImageBatches
from mmm.data.images.datasets import load_images
from mmm.models import weights
from mmm.models.cnn import CNN, CNNConfig
from mmm.parallel.plans.cnn import cnn_plan
from mmm.runtime.device import Precision
from mmm.trainer.config.layout import LayoutOptions, techniques_of
from mmm.trainer.config.resolve_plan import resolve_plan
from mmm.trainer.config.run import EvaluationOptions, RunOptions
from mmm.trainer.config.spec import TrainingSpec
from mmm.trainer.loop.fit import FitConfig, fit
from mmm.trainer.loop.image_task import ImageTask
from mmm.trainer.run.parallel_model import build_parallel_model
from support.runs import make_run

CONFIG = CNNConfig(image_size=8, width1=4, width2=4, hidden=8).without_dropout()
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
        loss = F.cross_entropy(model(batch.inputs.double()), batch.targets)
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
