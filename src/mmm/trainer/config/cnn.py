"""The flags of the MNIST net, and what the two programs that train it decide before their ranks meet."""

from __future__ import annotations

from dataclasses import dataclass

from mmm.errors import ConfigError
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.cnn.definition import MODEL
from mmm.models.cnn.model import CNNConfig
from mmm.models.definition import check_sizes
from mmm.trainer.config.images import ImageOptions, check_images
from mmm.trainer.config.run import StepOptions
from mmm.trainer.config.scaled_lr import ScaledOptions, with_scaled_lr
from mmm.trainer.job import Job


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
class CNNOptions:
    """The MNIST net, and its learning rate along the epochs."""

    gamma: float | None = None
    """Factor of the learning rate after each epoch. Default: 0.7 (digits 0.85)."""
    dropout: bool = True

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise ConfigError(f"--gamma {self.gamma}: it must be above 0, and at most 1")


def resolve_cnn(
    options: CNNOptions,
    data_options: ImageOptions,
    run: StepOptions,
    layout: Layout,
    techniques: Techniques,
    optimizer: ScaledOptions,
    *,
    dropout: bool = True,
) -> Job:
    """Find the images, and decide on model, batch, steps and learning rate; needs no process group.

    Args:
        layout: fitted to the number of ranks.
        optimizer: its flags.
        dropout: False: none, whatever the flags say.

    Raises:
        UserError: anything that does not fit.
    """
    data = data_options.load(seed=run.seed)
    defaults = SMALL_SET if data.name == "digits" else DEFAULTS
    default = max(defaults.global_batch // layout.dp, 1) if defaults.global_batch else defaults.batch
    local_batch_size, global_batch_size = batch_sizes(run.batch_size, run.global_batch_size, layout.dp, default)
    channels, size, _ = data.shape
    sizes = CNNConfig(channels=channels, image_size=size, classes=len(data.classes))
    if not (options.dropout and dropout):
        sizes = sizes.without_dropout()
    check_sizes(sizes, layout)
    model, sample = MODEL.on_meta(sizes, local_batch_size)
    steps_per_epoch = check_images(data, global_batch_size, layout.dp)
    job = Job(
        layout=layout,
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=run.steps(steps_per_epoch, defaults.epochs * steps_per_epoch),
        techniques=techniques,
        optimizer=optimizer.optimizer,
        gamma=defaults.gamma if options.gamma is None else options.gamma,
    )
    return with_scaled_lr(job, optimizer, defaults.global_batch or defaults.batch)
