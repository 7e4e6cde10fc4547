"""The CNN by itself: sizes and shapes."""

import pytest
import torch
from torch import nn

from mmm.models.cnn.model import CNN, CNNConfig
from mmm.nn import init, weights

SMALL = CNNConfig(channels=3, image_size=13, classes=7, width1=4, width2=6, hidden=10)


@pytest.fixture
def model():
    model = CNN(SMALL).double()
    weights.initialize(model, 0)
    return model


def images(batch=5):
    return torch.randn(batch, 3, 13, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_published_size():
    model = CNN()
    assert init.parameter_count(model) == 1_199_882
    assert model.fc1.weight.shape == (128, 9216)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_same_as_the_layers_one_after_the_other(model):
    plain = nn.Sequential(
        model.conv1, nn.ReLU(), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), model.fc1, nn.ReLU(), model.fc2
    )
    assert torch.equal(model.eval()(images()), plain(images()))
    assert model(images()).dtype == torch.float64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 5}, "image_size is 5"),
        ({"channels": 0}, "channels is 0"),
        ({"fc_dropout": 1.0}, "fc_dropout is 1.0"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        CNN(CNNConfig(**changes))


def test_images_that_do_not_fit(model):
    with pytest.raises(ValueError, match=r"\(1, 13, 13\)"):
        model(images()[:, :1])
