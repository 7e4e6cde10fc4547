"""Learning-rate schedules."""

from types import SimpleNamespace

import pytest
import torch

from mmm.trainer.config import Optimizer
from mmm.trainer.rate import schedule_of, step_decay, warmup_cosine, warmup_stable_decay


def test_warmup_then_cosine():
    factor = warmup_cosine(steps=101, warmup=10)
    values = [factor(step) for step in range(101)]
    assert values[0] == pytest.approx(0.1)
    assert values[9] == values[10] == 1.0
    assert values[55] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0.0, abs=1e-12)
    assert max(values) == 1.0
    assert warmup_cosine(1, 0)(0) == 1.0


def test_warmup_stable_decay():
    factor = warmup_stable_decay(steps=20, warmup=4, decay=5)
    expected = [0.25, 0.5, 0.75, 1.0, *[1.0] * 11, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert [factor(step) for step in range(20)] == pytest.approx(expected)
    assert [warmup_stable_decay(3, 0, 0)(step) for step in range(3)] == [1.0] * 3


def test_the_least_rate():
    """What is left of 1 is `least` higher at its lowest, in proportion between."""
    for made in (lambda **least: warmup_cosine(20, 4, **least), lambda **least: warmup_stable_decay(20, 4, 9, **least)):
        plain, raised = made(), made(least=0.1)
        assert [raised(step) for step in range(4)] == [plain(step) for step in range(4)]
        for step in range(4, 20):
            assert raised(step) == pytest.approx(0.1 + 0.9 * plain(step))
    assert warmup_cosine(20, 4, 0.1)(19) == pytest.approx(0.1)
    chosen = Optimizer(lr=2e-3, min_lr=2e-4)
    assert schedule_of(SimpleNamespace(note=print), 20, chosen)(19) == pytest.approx(0.1)


def test_the_schedule_that_the_flags_ask_for():
    notes = []
    run = SimpleNamespace(note=notes.append)
    wsd = Optimizer(warmup=10, lr_schedule="wsd")
    long, whole = schedule_of(run, 100, wsd), warmup_stable_decay(100, 10, 20)  # a fifth
    assert [long(step) for step in range(100)] == [whole(step) for step in range(100)]
    cosine = schedule_of(run, 100, Optimizer(warmup=10))
    assert [cosine(step) for step in range(100)] == [warmup_cosine(100, 10)(step) for step in range(100)]
    assert notes == []
    short = schedule_of(run, 10, Optimizer(warmup=8, lr_schedule="wsd", decay=9))
    assert [short(step) for step in range(10)] == [warmup_stable_decay(10, 5, 5)(step) for step in range(10)]
    assert notes == [
        "warm-up: 5 instead of 8 steps, half of the 10 of this run",
        "decay: 5 instead of 9 steps, all that the warm-up leaves",
    ]


def test_step_decay_is_steplr():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    factor = step_decay(steps_per_epoch=5, gamma=0.7)
    for epoch in range(4):
        assert factor(epoch * 5) == factor(epoch * 5 + 4) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
