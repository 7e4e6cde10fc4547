"""A model that does not learn, on one device: that other programs agree with it says nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmm_verify import verify
from support.by_hand import averaged, nothing


def fields():
    return torch.randn(8, 3), torch.randn(8, 2)


def classes():
    return torch.randn(8, 3), torch.randint(2, (8,))


def ignored():
    return torch.randn(8, 3), torch.full((8,), -100)


def alike():
    return torch.ones(8, 3), torch.ones(8, 2)


def twice_the_same():
    return torch.randn(4, 3).repeat(2, 1), torch.ones(8, 2)


class Gated(nn.Module):
    """A residual branch behind a gate that nothing opens."""

    def __init__(self, opening=0.0):
        super().__init__()
        self.inlet, self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("gate", torch.tensor(opening))

    def forward(self, x):
        h = self.inlet(x)
        return self.head(h + self.gate * self.body(h))


class Shut(Gated):
    def forward(self, x):
        return super().forward(x) * self.gate


class Certain(nn.Linear):
    """Probabilities that add up to 1, whatever the weights are, but for rounding."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x).softmax(-1).sum(-1, keepdim=True)


def mean_of_labelled(model, batch):
    inputs, labels = batch
    losses = F.cross_entropy(model(inputs), labels, reduction="sum")
    return losses / (labels != -100).sum().clamp(min=1)


def times_nothing(model, batch):
    return F.mse_loss(0 * model(batch[0]), batch[1])


def of_its_output(model, batch):
    return model(batch[0]).mean()


def decay_alone(model, batch):
    shown = F.mse_loss(model(batch[0]), batch[1]).detach()
    return shown + sum(parameter.square().sum() for parameter in model.parameters())


def without_mean(model, batch):
    """A loss of 0, as a policy's with advantages around their mean: its gradients are not 0."""
    scores = model(batch[0]).mean(-1)
    return (scores - scores.detach()).mul(batch[1].mean(-1)).mean()


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
@pytest.mark.parametrize(
    ("model", "batch", "step", "says"),
    [
        (Shut, fields, None, "every gradient on one device is 0"),
        (Gated, ignored, mean_of_labelled, "every gradient on one device is 0, and the loss is 0 "),
        (Gated, fields, times_nothing, "every gradient on one device is 0"),
        (Certain, fields, of_its_output, "every gradient on one device is 0, and the loss is 1 "),
        (Gated, fields, decay_alone, "they do not change with the input"),
    ],
)
def test_dead(model, batch, step, says, mesh):
    verdict = verify(model, nothing, batch, step, mesh)
    assert verdict.exit_code == 2, str(verdict)
    assert says in verdict.reason


@pytest.mark.parametrize("batch", [alike, twice_the_same])
def test_a_batch_that_repeats_itself(batch):
    verdict = verify(Gated, nothing, batch, mesh="dp2")
    assert verdict.exit_code == 2, str(verdict)
    assert "2 parts are alike" in verdict.reason
    assert verify(Gated, nothing, batch, mesh="tp2").same


@pytest.mark.parametrize(
    ("model", "batch", "step"),
    [
        (lambda: Gated(1.0), fields, None),
        (lambda: Gated(1e-6), fields, None),
        (lambda: Gated(1.0), classes, mean_of_labelled),
        (lambda: Gated(1.0), fields, without_mean),
    ],
)
def test_alive(model, batch, step):
    verdict = verify(model, averaged, batch, step, "dp2")
    assert verdict.same, str(verdict)
    assert not verdict.notes


def test_a_dead_part_is_said():
    verdict = verify(Gated, averaged, fields, mesh="dp2")
    assert verdict.same, str(verdict)
    assert "the gradient of body.weight and of 1 more is exactly 0 on one device" in str(verdict)
