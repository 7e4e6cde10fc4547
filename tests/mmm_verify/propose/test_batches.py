"""Batches for models of transformers, from their config and the arguments of their forward; nothing is installed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmm_verify.errors import ConfigError
from mmm_verify.propose.batches import hugging_face_batches
from mmm_verify.propose.models import loss_or_square

# What a model of transformers says of its inputs.
CONFIG = SimpleNamespace(vocab_size=40, image_size=32, num_channels=3, num_labels=2)


def model_kind(forward, main):
    return type("Model", (), {"forward": forward, "main_input_name": main})


def shapes(kind, with_loss=False):
    batches = hugging_face_batches(kind, CONFIG, 4, with_loss)
    return [{name: tuple(tensor.shape) for name, tensor in make().items()} for make in batches]


def test_what_the_forward_needs_comes_first():
    text = model_kind(lambda self, input_ids=None, labels=None: None, "input_ids")
    assert shapes(text, with_loss=True)[0] == {"input_ids": (4, 16), "labels": (4, 16)}
    images = model_kind(lambda self, pixel_values, labels=None: None, "pixel_values")
    assert shapes(images, with_loss=True)[0] == {"pixel_values": (4, 3, 32, 32), "labels": (4,)}
    both = model_kind(lambda self, input_ids=None, pixel_values=None: None, "input_ids")
    assert shapes(both)[0] == {"input_ids": (4, 16)}
    assert {"input_ids": (4, 16), "pixel_values": (4, 3, 32, 32)} in shapes(both)


def test_an_argument_that_is_not_known():
    """Neither tokens nor images: the user is told which one."""
    kind = model_kind(lambda self, pixel_values, grid_thw: None, "pixel_values")
    with pytest.raises(ConfigError, match="needs grid_thw"):
        hugging_face_batches(kind, CONFIG, 4, False)


class Outputs(nn.Module):
    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs


def test_the_loss_of_a_model_that_computes_none():
    batch = {"x": torch.zeros(4, 2)}
    samples = torch.full((4, 3), 2.0, requires_grad=True)
    between_samples = torch.full((4, 4), 9.0, requires_grad=True)
    assert loss_or_square(Outputs(between_samples, samples), batch).item() == 4
    assert loss_or_square(Outputs(between_samples), batch).item() == 81
    with pytest.raises(ConfigError, match="no tensor of floats"):
        loss_or_square(Outputs(torch.ones(4, dtype=torch.long)), batch)
