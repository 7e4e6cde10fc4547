"""Batches of images: the global batch of step k depends on (seed, k, global batch size) alone, never on the mesh.

In use::

    batches = ImageBatches(data.train, global_batch=64, seed=0)
    loader = batches.loader(coordinate, dp)                # this rank's local batches
    for batch in loader.epoch(0):
        loss_sum = (cross_entropy(model(batch.images), batch.labels, reduction="none") * batch.weights).sum()
        loss = loss_sum / batch.count                      # summed over ranks: the mean over the global batch

    for batch in evaluation(data.test, batch=64, coordinate=coordinate, dp=dp).epoch(0):
        correct += ((model(batch.images).argmax(1) == batch.labels) * batch.weights).sum()
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmm.data.images.image_set import ImageSet
from mmm.data.order import epoch_order
from mmm.data.workers import read
from mmm.errors import DataError, UserError


@dataclass(frozen=True)
class ImageBatch:
    """A local batch.

    Attributes:
        images: (batch, channels, height, width) float32, normalised; zeros for padding.
        labels: (batch,) int64. weights: (batch,) float32, 1 for a sample and 0 for padding.
        count: samples in the global batch, without padding: the divisor of a sum of losses.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    count: int

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> ImageBatch:
        """On that device; images and weights in `dtype`, if one is given."""
        return ImageBatch(
            self.images.to(device, dtype, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, dtype, non_blocking=True),
            self.count,
        )

    def pin_memory(self) -> ImageBatch:
        return replace(
            self, images=self.images.pin_memory(), labels=self.labels.pin_memory(), weights=self.weights.pin_memory()
        )


class ImageBatches:
    """A set of images in global batches; every epoch has each image once, in an order of its own.

    Args:
        image_set: what to read. global_batch: samples of a step over all ranks.
        shuffle: False keeps the order of the set.
        drop_last: leave out the samples at an epoch's end that do not fill a global batch; False returns them as a
            last global batch with a smaller ``count`` and padding.

    Raises:
        DataError: the global batch is not positive, or larger than the set while the last is dropped.
    """

    def __init__(
        self,
        image_set: ImageSet,
        global_batch: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        if global_batch < 1:
            raise DataError(f"a global batch of {global_batch} images: it needs at least 1")
        if drop_last and image_set.samples < global_batch:
            raise DataError(
                f"the set has {image_set.samples} images, fewer than one global batch of {global_batch}: "
                f"use a smaller batch"
            )
        self.image_set, self.global_batch, self.seed = image_set, global_batch, seed
        self.shuffle, self.drop_last = shuffle, drop_last

    @property
    def steps_per_epoch(self) -> int:
        full, left_over = divmod(self.image_set.samples, self.global_batch)
        return full if self.drop_last else full + (left_over > 0)

    def batch(self, step: int, first_sample: int = 0, size: int | None = None) -> ImageBatch:
        """Samples first_sample … first_sample + size − 1 of the global batch of a step; `size` None: all from there on.

        Args:
            step: from 0, over all epochs.
            first_sample, size: the local batch of data-parallel coordinate c starts at ``c * size``.

        Raises:
            DataError: an image cannot be read.
        """
        size = self.global_batch - first_sample if size is None else size
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        samples, begin = self.image_set.samples, step_of_epoch * self.global_batch
        order = epoch_order(self.seed, epoch, samples) if self.shuffle else np.arange(samples)
        indices = order[begin : begin + self.global_batch]  # of the global batch, (count,)
        chosen = indices[first_sample : first_sample + size]
        images, labels = self.image_set.images(chosen)
        padding = size - len(chosen)
        return ImageBatch(
            images=torch.cat([images, images.new_zeros(padding, *self.image_set.shape)]) if padding else images,
            labels=torch.cat([labels, labels.new_zeros(padding)]) if padding else labels,
            weights=torch.cat([torch.ones(len(chosen)), torch.zeros(padding)]),
            count=len(indices),
        )

    def loader(self, coordinate: int = 0, dp: int = 1, **reading: Any) -> ImageLoader:
        """The local batches of one data-parallel coordinate; `reading` as of `ImageLoader`."""
        return ImageLoader(self, coordinate, dp, **reading)


def evaluation(image_set: ImageSet, batch: int, coordinate: int, dp: int, **reading: Any) -> ImageLoader:
    """One data-parallel coordinate's images of a test set, in order; each image is read once over all coordinates.

    Every coordinate gets the same number of batches of the same shape, because the collectives inside a forward pass
    have to match. Missing images are padding, with weight 0.

    Args:
        batch: images of one coordinate's forward pass. reading: as of `ImageLoader`.
    """
    batches = ImageBatches(image_set, batch * dp, shuffle=False, drop_last=False)
    return batches.loader(coordinate, dp, **reading)


class ImageLoader:
    """The local batches of one data-parallel coordinate, read ahead by worker processes where that helps.

    The batches do not depend on the workers.

    Args:
        coordinate, dp: place on the data-parallel axis, and its size.
        workers: processes that decode images ahead; None means 0 for images in memory, else up to 4.
        pin_memory: keep batches in page-locked memory, for an accelerator that copies from it (CUDA, XPU).
        timeout: as of `mmm.data.workers.read`.

    Raises:
        DataError: the global batch cannot be split into `dp` equal parts, or there is no such coordinate.
    """

    def __init__(
        self,
        batches: ImageBatches,
        coordinate: int,
        dp: int,
        *,
        workers: int | None = None,
        pin_memory: bool = False,
        timeout: float = 0.0,
    ) -> None:
        if not 0 <= coordinate < dp:
            raise DataError(f"data-parallel coordinate {coordinate} is not between 0 and {dp - 1}")
        if batches.global_batch % dp:
            raise DataError(
                f"a global batch of {batches.global_batch} images cannot be split into {dp} equal parts: "
                f"use a multiple of {dp}"
            )
        self.batches, self.size = batches, batches.global_batch // dp
        self.first_sample = coordinate * self.size
        self._steps = _Steps()
        usable = max(len(os.sched_getaffinity(0)) - 1, 0) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = (0 if batches.image_set.in_memory else min(4, usable)) if workers is None else workers
        self.pin_memory, self.timeout = pin_memory, timeout
        self._loader: torch.utils.data.DataLoader | None = None

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.batches.steps_per_epoch

    def epoch(self, epoch: int = 0, first: int = 0) -> Iterator[ImageBatch]:
        """The batches of an epoch, from its step `first` on. A new call ends an earlier one's reading.

        Raises:
            DataError: an image cannot be read, or a worker fails.
        """
        self._steps.now = range(epoch * len(self) + first, (epoch + 1) * len(self))
        if self._loader is None:
            self._loader = torch.utils.data.DataLoader(
                _StepDataset(self.batches, self.first_sample, self.size),
                batch_size=None,
                sampler=self._steps,
                num_workers=self.workers,
                persistent_workers=self.workers > 0,
                pin_memory=self.pin_memory,
                generator=torch.Generator(),  # the loader's own draw must not advance the model's random generator
            )
        try:
            yield from read(self._loader, self.timeout)
        except UserError:
            self._loader = None  # ends the workers; another epoch starts new ones
            raise


class _Steps(torch.utils.data.Sampler):
    """The steps to read now; read anew every epoch, while the workers stay alive.

    It has no reference to its loader: in a reference cycle, a data loader's workers are not told to end, and Python
    waits 5 s for each.
    """

    now = range(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _StepDataset(torch.utils.data.Dataset):
    """Step → batch. A user's error is returned as a value, because a worker would wrap it into its traceback."""

    def __init__(self, batches: ImageBatches, first_sample: int, size: int) -> None:
        self.batches, self.first_sample, self.size = batches, first_sample, size

    def __getitem__(self, step: int) -> ImageBatch | UserError:
        try:
            return self.batches.batch(step, self.first_sample, self.size)
        except UserError as error:
            return error
