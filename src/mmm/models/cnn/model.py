"""A small convolutional net for images such as MNIST's: two convolutions and two linear layers.

With the default sizes it has 1,199,882 parameters, 98 % of them in ``fc1.weight``.

Source: the MNIST example of github.com/pytorch/examples; LeCun et al., "Gradient-based learning", 1998.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.dropout import Dropout
from mmm.nn.init import Init
from mmm.nn.sizes import below_one, check_images


@dataclass(frozen=True)
class CNNConfig:
    """Sizes of the net.

    Attributes:
        channels: number of channels of an image.
        image_size: side of the square images, in pixels.
        classes: number of classes.
        width1: number of channels that the first convolution makes.
        width2: number of channels that the second convolution makes.
        hidden: width of ``fc1``.
        conv_dropout: fraction of elements that are set to 0 in training, after the convolutions.
        fc_dropout: fraction of elements that are set to 0 in training, after ``fc1``.
    """

    model_name: ClassVar[str] = "cnn"

    channels: int = 1
    image_size: int = 28
    classes: int = 10
    width1: int = 32
    width2: int = 64
    hidden: int = 128
    conv_dropout: float = 0.25
    fc_dropout: float = 0.5

    @property
    def pooled_size(self) -> int:
        """Side of the image in pixels, after two 3 × 3 convolutions without padding and a pooling by 2."""
        return (self.image_size - 4) // 2

    @property
    def features(self) -> int:
        """Number of elements of one sample that ``fc1`` takes."""
        return self.width2 * self.pooled_size**2

    def without_dropout(self) -> CNNConfig:
        return replace(self, conv_dropout=0.0, fc_dropout=0.0)

    def problems(self) -> list[str]:
        """What is wrong with these sizes on any layout, one sentence each. Empty if they fit together."""
        problems = below_one(self, ("channels", "classes", "width1", "width2", "hidden"))
        if self.image_size < 6:
            problems.append(
                f"image_size is {self.image_size}: two 3 × 3 convolutions and a pooling by 2 need at least 6"
            )
        for name in ("conv_dropout", "fc_dropout"):
            value = getattr(self, name)
            # NaN is refused as well.
            if not 0 <= value < 1:
                problems.append(f"{name} is {value}: it must be at least 0 and below 1")
        return problems


class CNN(nn.Module):
    """Images (batch, channels, image_size, image_size) to logits (batch, classes).

    A pipeline stage is this class with some of ``conv1``, ``conv2``, ``fc1``, ``fc2`` set to None: forward skips them.
    """

    def __init__(self, config: CNNConfig | None = None) -> None:
        super().__init__()
        config = config or CNNConfig()
        problems = config.problems()
        if problems:
            raise ValueError("; ".join(problems))
        self.config = config
        self.conv1: nn.Module | None = nn.Conv2d(config.channels, config.width1, 3)
        self.conv2: nn.Module | None = nn.Conv2d(config.width1, config.width2, 3)
        # The number of a dropout decides, with the sample's key, what it drops: the same on any mesh.
        self.dropout1 = Dropout(config.conv_dropout, 1)
        self.fc1: nn.Module | None = nn.Linear(config.features, config.hidden)
        self.dropout2 = Dropout(config.fc_dropout, 2)
        self.fc2: nn.Module | None = nn.Linear(config.hidden, config.classes)

    def forward(self, x: Tensor, sample_keys: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (batch, channels, image_size, image_size), or the previous stage's output where ``conv1`` is None.
            sample_keys: (batch,) int64, for dropout (`mmm.nn.dropout.sample_keys`).

        Raises:
            ValueError: images of another size or number of channels.
        """
        if self.conv1 is not None:
            check_images(x, self.config.channels, self.config.image_size, "net")
            # (batch, width1, image_size - 2, image_size - 2)
            x = F.relu(self.conv1(x))
        if self.conv2 is not None:
            # (batch, width2, image_size - 4, image_size - 4)
            x = F.relu(self.conv2(x))
            # (batch, width2, pooled_size, pooled_size)
            x = F.max_pool2d(x, 2)
            # (batch, features)
            x = self.dropout1(x, sample_keys).flatten(1)
        if self.fc1 is not None:
            # (batch, hidden)
            x = F.relu(self.fc1(x))
            x = self.dropout2(x, sample_keys)
        if self.fc2 is not None:
            # (batch, classes)
            x = self.fc2(x)
        return x

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn: weight and bias uniform within ±1 / sqrt(fan-in), as PyTorch does.

        Args:
            name: the canonical parameter name.
        """
        # Number of inputs of each output element. A kernel of a convolution has 3 × 3 pixels.
        fan_in = {
            "conv1": 9 * self.config.channels,
            "conv2": 9 * self.config.width1,
            "fc1": self.config.features,
            "fc2": self.config.hidden,
        }
        module = name.split(".")[0]
        return Init("uniform", fan_in[module] ** -0.5)
