"""What is kept of a step of a script is that step's own. Two samples are the same only if all of their tensors are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mmm_verify.program.recorder import Recorder
from mmm_verify.program.samples import are_same, samples_in

LARGEST = 0.01


def batches():
    torch.manual_seed(0)
    # Two steps of two micro-batches.
    return torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 2)


def make():
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def take_step(model, optimizer, inputs, targets, clipping=True):
    """Returns the losses' sum, the gradients, and the gradients' norm."""
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        total += loss.item()
    gradients = [p.grad.clone() for p in model.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    if clipping:
        clip_grad_norm_(model.parameters(), LARGEST)
    else:
        for p in model.parameters():
            p.grad *= LARGEST / (norm + 1e-6)
    optimizer.step()
    optimizer.zero_grad()
    return total, gradients, norm


def test_each_step_has_its_own_losses_norms_and_gradients():
    """What the first step has seen would otherwise hide what is wrong in the second."""
    recordings = []
    recorder = Recorder(recordings.append, seed=0, nudge=None)
    with recorder.watching():
        model, optimizer = make()
        for inputs, targets in zip(*batches(), strict=True):
            take_step(model, optimizer, inputs, targets)
    (recording,) = recordings
    model, optimizer = make()
    for seen, samples, inputs, targets in zip(recording.steps, recording.samples, *batches(), strict=True):
        loss, gradients, norm = take_step(model, optimizer, inputs, targets, clipping=False)
        assert seen.loss.local.item() == pytest.approx(loss)
        assert [value.local.item() for value in seen.norms] == pytest.approx([norm])
        for name, gradient in zip(("weight", "bias"), gradients, strict=True):
            torch.testing.assert_close(seen.before_clipping(name).local, gradient)
        assert are_same(samples, samples_in(inputs.flatten(0, 1)))


class Counted(nn.Linear):
    def forward(self, x, count):
        return super().forward(x) / count


def test_a_number_that_micro_batches_share_hides_none_of_them():
    """Trainer gives each of them the step's number of labels. As one of them, the others were taken for known."""
    recordings = []
    recorder = Recorder(recordings.append, seed=0, nudge=None)
    inputs, _ = batches()
    with recorder.watching():
        model = Counted(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro_batches in inputs:
            count = torch.tensor(8)
            for x in micro_batches:
                model(x, count).square().mean().backward()
            optimizer.step()
    for seen, micro_batches in zip(recordings[0].samples, inputs, strict=True):
        assert are_same(seen, samples_in(micro_batches.flatten(0, 1)))


def test_a_small_tensor_beside_a_large_one_tells_samples_apart():
    """Coordinates in metres next to a field of millionths, of which each sample has its own."""
    coordinates = 1e6 * torch.ones(2, 5)
    field = 1e-6 * torch.randn(2, 5)
    samples = samples_in((coordinates, field))
    assert are_same(samples, samples_in((coordinates, field * (1 + 1e-7))))
    assert not are_same(samples, samples_in((coordinates, field * 1.01)))
