"""Ten steps of training side by side: what is wrong only after several steps, such as the state of an optimizer or the
bias of experts, which the two steps of the proof would not show."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from mmm_lab.parity import models
from mmm_lab.parity.layouts import make_case
from mmm_lab.parity.subject import build, make_batch, make_optimizer, own_samples, parallelize, prepare, take_step
from support.clock import PATIENCE

STEPS = 10
SAMPLES = 16


def batch_of(case, step):
    """A step's own batch."""
    return make_batch(models.find(case.model), case.data, SAMPLES, step)


def on_one_device(case):
    """The losses of plain PyTorch."""
    parity = models.find(case.model)
    model = build(parity, torch.float64)
    optimizer = make_optimizer("adamw", model.parameters())
    losses = []
    for step in range(STEPS):
        loss = take_step(parity, model, batch_of(case, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_ranks(rank, case):
    """The losses that a rank sees."""
    parity = models.find(case.model)
    ready = prepare(parity, case, SAMPLES)
    program = parallelize(ready, "adamw", "fp64", None, init_device_mesh("cpu", (case.ranks,)))
    losses = []
    for step in range(STEPS):
        own = own_samples(ready, batch_of(case, step), None)
        losses.append(take_step(parity, program, own))
        program[-1].step()
        program[-1].zero_grad()
    return losses


@pytest.mark.parametrize(
    ("model", "layout", "technique"),
    [
        ("moe", "dp2.tp2.ep2", "zero1"),
        ("cnn", "pp2.dp2", ""),
        pytest.param("transformer", "dp2.cp2", "packed", marks=pytest.mark.long),
        pytest.param("gpt_dropout", "dp2.tp2", "", marks=pytest.mark.long),
    ],
)
def test_ten_steps(run_on_ranks, model, layout, technique):
    """Every rank sees the losses of plain PyTorch, each step with a batch of its own."""
    case = make_case(model, layout, technique)
    expected = on_one_device(case)
    assert len(set(expected)) == STEPS
    for losses in run_on_ranks(on_ranks, case.ranks, case, timeout=PATIENCE):
        assert losses == pytest.approx(expected, rel=1e-9)
