"""The verdict on a training: what is wrong, where, and how much of it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmm_lab.parity.layouts import ParityCase
from mmm_lab.parity.reference import Reference, Training
from mmm_lab.parity.report import evaluate
from mmm_lab.parity.train import Curve, gradient_differences

CASE, TRAINING = ParityCase(model="cnn", layout="dp2"), Training(steps=1)
EXPECTED = Reference([1.0], {name: torch.ones(1) for name in ("first", "second", "third")})


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ([{"first": 0.0, "second": 0.0, "third": 1e-9}] * 2, ""),
        (
            [{"first": 0.0, "second": 0.0, "third": 0.0}, {"first": 0.0, "second": 0.5, "third": 1e-9}],
            "the gradient of second on rank 1 differs by 5.0e-01, more than 1e-08",
        ),
        (
            [{"first": 1e-3, "second": 0.0, "third": 0.0}, {"first": 2e-3, "second": 0.5, "third": 0.0}],
            "worst of 2 wrong: the gradient of second on rank 1 differs by 5.0e-01, more than 1e-08",
        ),
        (
            [{"first": math.inf, "second": 0.1, "third": 0.1}],
            "worst of 3 wrong: the gradient of first on rank 0 differs by inf, more than 1e-08",
        ),
        (
            [{"first": 0.0, "second": math.nan, "third": 0.0}, {"first": 0.5, "second": 0.0, "third": 0.0}],
            "worst of 2 wrong: the gradient of second on rank 0 differs by nan, more than 1e-08",
        ),
    ],
)
def test_how_many_gradients_are_wrong(differences, reason):
    curves = [Curve([1.0], each, 0.0, None, None) for each in differences]
    row = evaluate(CASE, "sgd", TRAINING, EXPECTED, curves)
    assert (row.reason, row.passed) == (reason, not reason)


@pytest.mark.parametrize("losses", [[[1.0, math.nan]], [[math.nan, 1.0]], [[1.0, 1.0], [1.0, math.nan]]])
def test_a_loss_that_is_nan_does_not_pass(losses):
    curves = [Curve(some, dict.fromkeys(EXPECTED.gradients, 0.0), 0.0, None, None) for some in losses]
    expected = Reference([1.0, 1.0], EXPECTED.gradients)
    row = evaluate(CASE, "sgd", TRAINING, expected, curves)
    step = losses[-1].index(max(losses[-1], key=math.isnan)) + 1
    assert not row.passed
    assert f"step {step} differs by nan" in row.reason


def test_a_tied_weight_keeps_the_nan_of_its_first_copy():
    """A rank that has a tied weight in two stages compares it twice."""
    copies = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    copies[0].grad, copies[1].grad = torch.tensor([1.0, math.nan]), torch.ones(2)
    model = SimpleNamespace(named_parameters=lambda: [("weight", copy) for copy in copies])
    assert math.isnan(gradient_differences(model, {"weight": torch.ones(2)})["weight"])
