"""The verdict on a training: what is wrong, where, and how much of it."""

import math

import pytest
import torch

from mmm.parity.layouts import ParityCase
from mmm.parity.reference import Reference, Training
from mmm.parity.report import evaluate
from mmm.parity.train import Curve

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
    ],
)
def test_how_many_gradients_are_wrong(differences, reason):
    curves = [Curve([1.0], each, 0.0, None, None) for each in differences]
    row = evaluate(CASE, "sgd", TRAINING, EXPECTED, curves)
    assert (row.reason, row.passed) == (reason, not reason)
