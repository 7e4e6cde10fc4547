"""The bytes of tensors, when they are there, and what they are for."""

import torch
from torch import nn

from mmm_lab.planner.tracker import MemoryTracker


def test_a_step_of_one_layer():
    """By hand: 4 × 8 weights, 16 × 8 inputs, float32."""
    phase = ["start"]
    tracker = MemoryTracker("cpu", lambda: phase[0])
    with tracker.tracking():
        model = nn.Linear(8, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for step in range(2):
            phase[0] = f"step {step}"
            inputs = torch.ones(16, 8)
            loss = model(inputs).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del inputs, loss
    peaks = tracker.peaks()
    weights, activations = 4 * 4 * 8, 4 * 16 * 8
    assert peaks["step 0"].parts["parameters"] == weights
    last = peaks["step 1"]
    assert last.parts["optimizer state"] == last.parts["parameters"] == weights
    assert last.parts["activations"] >= activations
    assert sum(last.parts.values()) == last.bytes


def test_a_storage_counts_once_and_until_it_ends():
    tracker = MemoryTracker("cpu", lambda: "step 0")
    with tracker.tracking():
        x = torch.zeros(1000)
        views = x.view(10, 100), x[:5]
        del x, views
        torch.zeros(100)
    peak = tracker.peaks()["step 0"]
    assert peak.bytes == 4000
    assert sum(change.bytes for change in tracker.changes) == 0


def test_a_storage_that_is_freed_and_filled_in_place():
    tracker = MemoryTracker("cpu", lambda: "step 0")
    with tracker.tracking():
        x = torch.zeros(1000)
        storage = x.untyped_storage()
        storage.resize_(0)
        y = torch.zeros(500)
        storage.resize_(4000)
        assert tracker.peaks()["step 0"].bytes == 6000
        assert tracker.peaks()["step 0"].parts["gathered"] == 4000
        del x, y, storage


def test_logits_are_what_has_the_vocabulary():
    tracker = MemoryTracker("cpu", lambda: "step 0", widths={32})
    with tracker.tracking():
        logits, hidden = torch.zeros(4, 32), torch.zeros(4, 16)
    assert tracker.peaks()["step 0"].parts["logits"] == logits.nbytes
    assert tracker.peaks()["step 0"].parts["activations"] == hidden.nbytes
