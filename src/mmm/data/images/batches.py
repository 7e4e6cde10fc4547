"""Batches of images: the global batch of step k depends on (seed, k, global batch size) alone, never on the mesh.

In use::

    loader = ImageLoader(ImageBatches(data.train, global_batch=64, seed=0), coordinate, dp)    # this rank's
    for batch in loader.epoch(0):
        loss_sum = cross_entropy(model(batch.inputs), batch.targets, reduction="sum", ignore_index=PADDING)
        loss = loss_sum / batch.count                      # summed over ranks: the mean over the global batch
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from mmm.data.images.image_set import ImageSet
from mmm.data.order import epoch_order
from mmm.data.text.tokens import Batch
from mmm.data.workers import read
from mmm.errors import DataError, UserError
from mmm.layout import PADDING
from mmm.runtime.cores import usable_cores


class ImageBatches:
    """A set of images in global batches; every epoch has each image once, in an order of its own.

    Args:
        image_set: what to read. global_batch: samples of a step over all ranks.
        train: every epoch in an order of its own, without the samples at its end that do not fill a global batch. False
            keeps the order of the set, and has these as a last global batch with a smaller ``count`` and padding.

    Raises:
        DataError: the global batch is larger than the set to train on.
    """

    def __init__(self, image_set: ImageSet, global_batch: int, seed: int = 0, *, train: bool = True) -> None:
        self.image_set = image_set
        self.global_batch = global_batch
        self.seed = seed
        self.train = train
        samples = image_set.samples
        self.steps_per_epoch = samples // global_batch if train else -(-samples // global_batch)
        if not self.steps_per_epoch:
            raise DataError(
                f"the set has {samples} images, fewer than one global batch of {global_batch}: use a smaller batch"
            )

    def batch(self, step: int, first_sample: int = 0, size: int | None = None) -> Batch:
        """Samples first_sample … first_sample + size − 1 of the global batch of a step; `size` None: all from there on.

        Images are (batch, channels, height, width) float32, normalised; labels (batch,) int64. What fills up a last
        batch is images of zeros with the label `PADDING`; ``count`` leaves it out.

        Args:
            step: from 0, over all epochs.
            first_sample, size: the local batch of data-parallel coordinate c starts at ``c * size``.

        Raises:
            DataError: an image cannot be read.
        """
        if size is None:
            size = self.global_batch - first_sample
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        order = np.arange(self.image_set.samples)
        if self.train:
            order = epoch_order(self.seed, epoch, self.image_set.samples)
        of_step = order[step_of_epoch * self.global_batch :][: self.global_batch]  # (count,)
        chosen = of_step[first_sample : first_sample + size]
        images, labels = self.image_set.images(chosen)
        if len(chosen) < size:
            padding = size - len(chosen)
            images = torch.cat([images, images.new_zeros(padding, *self.image_set.shape)])
            labels = torch.cat([labels, labels.new_full((padding,), PADDING)])
        return Batch(images, labels, len(of_step))


class ImageLoader:
    """The local batches of one data-parallel coordinate, read ahead by worker processes where that helps.

    The batches do not depend on the workers.

    Args:
        coordinate, dp: place on the data-parallel axis, and its size.
        workers: processes that decode images ahead; None means 0 for images in memory, else up to 4.
        timeout: as of `mmm.data.workers.read`.
    """

    def __init__(
        self,
        batches: ImageBatches,
        coordinate: int = 0,
        dp: int = 1,
        *,
        workers: int | None = None,
        timeout: float = 0.0,
    ) -> None:
        self.batches = batches
        self.size = batches.global_batch // dp
        self.first_sample = coordinate * self.size
        if workers is None:
            workers = 0 if batches.image_set.in_memory else min(4, usable_cores() - 1)
        self.workers = workers
        self.timeout = timeout

    def epoch(self, epoch: int = 0, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from its step `first` on.

        Raises:
            DataError: an image cannot be read, or a worker fails.
        """
        steps = self.batches.steps_per_epoch
        loader = torch.utils.data.DataLoader(
            _StepDataset(self.batches, self.first_sample, self.size),
            batch_size=None,
            sampler=range(epoch * steps + first, (epoch + 1) * steps),
            num_workers=self.workers,
            generator=torch.Generator(),  # the loader's own draw must not advance the model's random generator
        )
        return read(loader, self.timeout)


def evaluation(image_set: ImageSet, batch: int, coordinate: int, dp: int, **reading: int | float | None) -> ImageLoader:
    """One data-parallel coordinate's images of a test set, in order; each image is read once over all coordinates.

    Every coordinate gets the same number of batches of the same shape, because the collectives inside a forward pass
    have to match.

    Args:
        batch: images of one coordinate's forward pass. reading: as of `ImageLoader`.
    """
    batches = ImageBatches(image_set, batch * dp, train=False)
    return ImageLoader(batches, coordinate, dp, **reading)  # type: ignore[arg-type]


class _StepDataset(torch.utils.data.Dataset):
    """Step → batch. A user's error is returned as a value, because a worker would wrap it into its traceback."""

    def __init__(self, batches: ImageBatches, first_sample: int, size: int) -> None:
        self.batches = batches
        self.first_sample = first_sample
        self.size = size

    def __getitem__(self, step: int) -> Batch | UserError:
        try:
            return self.batches.batch(step, self.first_sample, self.size)
        except UserError as error:
            return error
