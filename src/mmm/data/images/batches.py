"""Batches of images: the global batch of step k depends only on (seed, k, global batch size), never on the mesh.

In use::

    loader = ImageLoader(BatchOrder(data.train, global_batch=64, seed=0), coordinate, dp)    # this rank's
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
from mmm.data.workers import ErrorsAsValues, read
from mmm.errors import DataError
from mmm.layout import PADDING
from mmm_launch.contract import usable_cores


class BatchOrder:
    """A set of images in global batches.

    Args:
        image_set: the images to read.
        global_batch: number of samples in a step over all ranks.
        seed: seed of the order.
        train: if True, each epoch has an order of its own, and samples at its end that do not fill a global batch are
            left out. If False, samples keep their order in the set, and those at the end form a last global batch with
            a smaller ``count`` and padding.

    Attributes:
        steps_per_epoch: number of global batches in an epoch.

    Raises:
        DataError: the global batch is larger than the set to train on.
    """

    def __init__(self, image_set: ImageSet, global_batch: int, seed: int = 0, *, train: bool = True) -> None:
        self.image_set = image_set
        self.global_batch = global_batch
        self.seed = seed
        self.train = train
        samples = image_set.samples
        self.steps_per_epoch = samples // global_batch
        # A padded last batch of a test set.
        if not train and samples % global_batch:
            self.steps_per_epoch += 1
        if not self.steps_per_epoch:
            raise DataError(
                f"the set has {samples} images, fewer than one global batch of {global_batch}: use a smaller batch"
            )

    def batch(self, step: int, first_sample: int = 0, size: int | None = None) -> Batch:
        """Read samples first_sample … first_sample + size − 1 of a step's global batch.

        Images are (batch, channels, height, width) float32, normalised; labels are (batch,) int64. A last batch is
        filled up with images of zeros and the label `PADDING`, which ``count`` leaves out.

        Args:
            step: index of the step over all epochs, from 0.
            first_sample, size: the local batch. Data-parallel coordinate c starts at ``c * size``. A size of None means
                all samples from the first on.

        Raises:
            DataError: an image cannot be read.
        """
        if size is None:
            size = self.global_batch - first_sample
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        # (samples,)
        order = np.arange(self.image_set.samples)
        if self.train:
            order = epoch_order(self.seed, epoch, self.image_set.samples)
        begin = step_of_epoch * self.global_batch
        # (count,) indices of the global batch; fewer than global_batch in the last one of a test set
        of_step = order[begin : begin + self.global_batch]
        chosen = of_step[first_sample : first_sample + size]
        images, labels = self.image_set.images(chosen)
        n_padding = size - len(chosen)
        if n_padding > 0:
            no_images = images.new_zeros(n_padding, *self.image_set.shape)
            no_labels = labels.new_full((n_padding,), PADDING)
            images = torch.cat([images, no_images])
            labels = torch.cat([labels, no_labels])
        return Batch(images, labels, len(of_step))


class ImageLoader:
    """The local batches of one data-parallel coordinate, read ahead by worker processes where that helps.

    The batches do not depend on the number of workers.

    Args:
        batches: the global batches.
        coordinate: this rank's place on the data-parallel axis.
        dp: size of that axis.
        workers: number of processes that decode images ahead. None means 0 for images in memory, otherwise up to 4.
        timeout: seconds to wait for a batch; 0 waits forever.
    """

    def __init__(
        self,
        batches: BatchOrder,
        coordinate: int = 0,
        dp: int = 1,
        *,
        workers: int | None = None,
        timeout: float = 0.0,
    ) -> None:
        self.batches = batches
        # Samples of the local batch.
        self.size = batches.global_batch // dp
        self.first_sample = coordinate * self.size
        if workers is None:
            workers = 0
            if not batches.image_set.in_memory:
                workers = min(4, usable_cores() - 1)
        self.workers = workers
        self.timeout = timeout

    def epoch(self, epoch: int = 0, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, beginning with its step `first`.

        Raises:
            DataError: an image cannot be read, or a worker fails.
        """
        steps = self.batches.steps_per_epoch
        loader = torch.utils.data.DataLoader(
            ErrorsAsValues(self._batch),
            # An item of the data set is a batch already.
            batch_size=None,
            sampler=range(epoch * steps + first, (epoch + 1) * steps),
            num_workers=self.workers,
            # The loader draws a seed for its workers. It must not advance the generator that the model draws from.
            generator=torch.Generator(),
        )
        return read(loader, self.timeout)

    def _batch(self, step: int) -> Batch:
        return self.batches.batch(step, self.first_sample, self.size)


def evaluation(image_set: ImageSet, batch: int, coordinate: int, dp: int, **reading: int | float | None) -> ImageLoader:
    """Load one data-parallel coordinate's images of a test set, in order.

    Over all coordinates, each image is read once. Every coordinate gets the same number of batches of the same shape,
    because ranks must run the same collectives in their forward passes.

    Args:
        batch: number of images in one coordinate's forward pass.
        reading: ``workers`` and ``timeout`` of `ImageLoader`.
    """
    batches = BatchOrder(image_set, batch * dp, train=False)
    return ImageLoader(batches, coordinate, dp, **reading)  # type: ignore[arg-type]
