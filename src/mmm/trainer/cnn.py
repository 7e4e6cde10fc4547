"""What the two CNN programs, ``mmm.examples.fsdp`` and ``mmm.trainer.fsdp``, have in common: flags and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mmm.data.images import ImageData
from mmm.errors import ConfigError
from mmm.models.cnn import CNNConfig
from mmm.parallel.mesh import Layout, batch_sizes
from mmm.parallel.plans.cnn import check_cnn
from mmm.runtime.ranks import Rank
from mmm.trainer.options import RunOptions, Unused
from mmm.trainer.vision import ImageOptions, check_images


@dataclass(frozen=True)
class Defaults:
    """How long and how fast to train on a data set. ``global_batch`` None: ``batch`` for every rank."""

    epochs: int
    batch: int
    gamma: float
    global_batch: int | None = None


DEFAULTS = Defaults(epochs=10, batch=64, gamma=0.7)
SMALL_SET = Defaults(epochs=8, batch=32, gamma=0.85, global_batch=32)  # digits: 1,437 images are 44 steps an epoch


@dataclass(frozen=True, kw_only=True)
class CNNOptions(ImageOptions):
    """Flags of the MNIST net."""

    gamma: float | None = None
    """Factor of the learning rate after each epoch. Default: 0.7 (digits 0.85)."""
    scale_lr: Literal["none", "sqrt", "linear"] = "none"
    """Scale the learning rate with the number of data-parallel ranks."""
    dropout: bool = True
    compile: Unused[bool] = False  # the net's plan names nothing to compile
    log_every: Unused[int] = 1  # a row an epoch


@dataclass(frozen=True)
class ResolvedCNN:
    """Everything that is decided before the ranks meet.

    Attributes:
        batch, global_batch: samples of a step, of one rank and of all. steps: of the run.
        lr: as scaled. gamma: its factor after each epoch.
        sample: what a step's forward takes of one coordinate, (batch, channels, size, size), on the meta device.
    """

    data: ImageData
    layout: Layout
    model: CNNConfig
    batch: int
    global_batch: int
    steps: int
    lr: float
    gamma: float
    sample: Tensor

    def describe(self) -> dict[str, Any]:
        """What the record keeps."""
        return {
            "model": self.model,
            "global_batch_size": self.global_batch,
            "steps": self.steps,
            "scaled_lr": self.lr,
            "gamma": self.gamma,
        }


def resolve(options: CNNOptions, run: RunOptions, layout: Layout, rank: Rank) -> ResolvedCNN:
    """Find the data, and work out model, batch, steps and rate; needs no process group.

    Args:
        layout: fitted.

    Raises:
        UserError: anything that does not fit.
    """
    run.check()
    if options.gamma is not None and not 0 < options.gamma <= 1:
        raise ConfigError(f"--gamma {options.gamma}: it must be above 0, and at most 1")
    data = options.load_images(rank, seed=run.seed)
    usual = SMALL_SET if data.name == "digits" else DEFAULTS
    batch = max(usual.global_batch // layout.dp, 1) if usual.global_batch else usual.batch
    batch, global_batch = batch_sizes(run.batch_size, run.global_batch_size, layout.dp, batch)
    channels, size, _ = data.shape
    model = CNNConfig(channels=channels, image_size=size, classes=len(data.classes))
    model = model if options.dropout and run.break_ is None else model.without_dropout()  # one device drops others
    check_cnn(model, layout)
    limits = run if run.epochs or run.max_iters else replace(run, epochs=usual.epochs)
    factor = {"none": 1.0, "sqrt": layout.dp**0.5, "linear": float(layout.dp)}[options.scale_lr]
    return ResolvedCNN(
        data,
        layout,
        model,
        batch,
        global_batch,
        limits.steps(check_images(data, global_batch, layout.dp)),
        run.lr * factor,
        usual.gamma if options.gamma is None else options.gamma,
        torch.zeros(batch, *data.shape, device="meta"),
    )
