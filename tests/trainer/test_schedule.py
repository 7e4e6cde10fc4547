"""Learning-rate schedules."""

import pytest
import torch

from mmm.trainer.schedule import constant, step_decay, warmup_cosine


def test_warmup_then_cosine():
    factor = warmup_cosine(steps=101, warmup=10)
    values = [factor(step) for step in range(101)]
    assert values[0] == pytest.approx(0.1)
    assert values[9] == values[10] == 1.0
    assert values[55] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0.0, abs=1e-12)
    assert max(values) == 1.0
    assert warmup_cosine(1, 0)(0) == 1.0


def test_step_decay_is_steplr():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    factor = step_decay(steps_per_epoch=5, gamma=0.7)
    for epoch in range(4):
        assert factor(epoch * 5) == factor(epoch * 5 + 4) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert constant(17) == 1.0
