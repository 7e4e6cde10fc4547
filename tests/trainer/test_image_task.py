"""Tasks on devices that are not here."""

from types import SimpleNamespace

import pytest
import torch

from mmm.data.images.batches import ImageBatches
from mmm.trainer.loop import image_task


@pytest.mark.parametrize(("kind", "pinned"), [("cuda", True), ("xpu", True), ("cpu", False)])
def test_images_are_pinned_for_what_copies_from_pinned_memory(monkeypatch, kind, pinned):
    asked = []
    monkeypatch.setattr(ImageBatches, "loader", lambda *given, pin_memory, **named: asked.append(pin_memory))
    images = SimpleNamespace(samples=16, __len__=lambda: 16)
    monkeypatch.setattr(image_task, "evaluation", lambda *given, pin_memory, **named: asked.append(pin_memory))
    monkeypatch.setattr(ImageBatches, "__init__", lambda self, *given: None)
    monkeypatch.setattr(ImageBatches, "steps_per_epoch", 1, raising=False)
    layout = SimpleNamespace(dp_coordinate=lambda rank: 0, dp=1)
    options = SimpleNamespace(timeout=600.0)
    run = SimpleNamespace(
        layout=layout,
        device=torch.device(kind),
        rank=SimpleNamespace(rank=0),
        seed=0,
        options=options,
        note=print,
    )
    data = SimpleNamespace(train=images, test=images)
    image_task.ImageTask(run, SimpleNamespace(data=data, global_batch_size=4, local_batch_size=4))
    assert asked == [pinned, pinned]
