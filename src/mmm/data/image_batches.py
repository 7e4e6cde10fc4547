"""Batches of images: the global batch of step k depends on (seed, k, global batch size) alone, never on the mesh.

In use::

    batches = ImageBatches(data.train, global_batch=64, seed=0)
    loader = batches.loader(coordinate, dp)                # this rank's part of every global batch
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

import numpy as np
import torch
from torch import Tensor

from mmm.data.images import ImageSet
from mmm.data.tokens import epoch_order, stream
from mmm.errors import DataError, UserError


@dataclass(frozen=True)
class ImageBatch:
    """Part of a global batch.

    Attributes:
        images: (batch, channels, height, width) float32, normalised; zeros where there is no sample.
        labels: (batch,) int64. weights: (batch,) float32, 1 for a sample and 0 for padding.
        indices: (batch,) int64, each sample's number in its set, −1 for padding.
        count: samples in the whole global batch, padding not counted: what a sum of losses is divided by.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    indices: Tensor
    count: int

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> ImageBatch:
        """On that device; images and weights in `dtype`, if one is given."""
        return ImageBatch(
            self.images.to(device, dtype, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.weights.to(device, dtype, non_blocking=True),
            self.indices,
            self.count,
        )

    def pin_memory(self) -> ImageBatch:
        return replace(
            self, images=self.images.pin_memory(), labels=self.labels.pin_memory(), weights=self.weights.pin_memory()
        )


@dataclass(frozen=True)
class Augment:
    """Small random changes to training images, drawn for each (seed, epoch, sample): not for a worker or a rank.

    Attributes:
        shift: pixels; each image moves by up to this much in each direction, with black coming in.
        flip: mirror every other image left to right. Not for digits or letters.
    """

    shift: int = 0
    flip: bool = False

    def __call__(self, pixels: Tensor, seed: int, epoch: int, indices: np.ndarray) -> Tensor:
        """(n, channels, height, width) uint8 → the same shape."""
        changed = torch.zeros_like(pixels, memory_format=torch.contiguous_format)
        height, width = pixels.shape[-2:]
        state = np.random.RandomState(0)
        for i, index in enumerate(indices):
            state.seed(stream(seed, epoch, int(index), 1))
            vertical, horizontal, mirror = state.randint(0, 1 << 16, size=3)
            image = pixels[i].flip(-1) if self.flip and mirror % 2 else pixels[i]
            down, right = (int(draw) % (2 * self.shift + 1) - self.shift for draw in (vertical, horizontal))
            changed[i, :, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
                :, max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
            ]
        return changed


class ImageBatches:
    """A set of images in global batches; every epoch has each image once, in an order of its own.

    Args:
        image_set: what to read. global_batch: samples of a step over all ranks.
        shuffle: False keeps the order of the set.
        drop_last: leave out the samples at an epoch's end that do not fill a global batch; False gives them as a
            last global batch whose ``count`` is smaller and whose missing places are padding.
        augment: random changes to the images.

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
        augment: Augment | None = None,
    ) -> None:
        if global_batch < 1:
            raise DataError(f"a global batch of {global_batch} images: it needs at least 1")
        if drop_last and image_set.samples < global_batch:
            raise DataError(
                f"the set has {image_set.samples} images, fewer than one global batch of {global_batch}: "
                f"use a smaller batch"
            )
        self.image_set, self.global_batch, self.seed = image_set, global_batch, seed
        self.shuffle, self.drop_last, self.augment = shuffle, drop_last, augment

    @property
    def steps_per_epoch(self) -> int:
        whole, left_over = divmod(self.image_set.samples, self.global_batch)
        return whole if self.drop_last else whole + (left_over > 0)

    def indices(self, step: int) -> np.ndarray:
        """The numbers of the samples of a global batch: (count,) int64. `step` counts from 0 over all epochs."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        samples, begin = self.image_set.samples, step_of_epoch * self.global_batch
        end = min(begin + self.global_batch, samples)
        return epoch_order(self.seed, epoch, samples)[begin:end] if self.shuffle else np.arange(begin, end)

    def batch(self, step: int, first: int = 0, size: int | None = None) -> ImageBatch:
        """Places first … first + size − 1 of the global batch of a step; `size` None: all after `first`.

        Args:
            step: from 0, over all epochs.
            first, size: in samples; the part of data-parallel coordinate c is ``first = c * size``.

        Raises:
            DataError: an image cannot be read.
        """
        size = self.global_batch - first if size is None else size
        whole = self.indices(step)
        chosen = whole[first : first + size]
        pixels, labels = self.image_set.pixels(chosen), self.image_set.labels(chosen)
        if self.augment:
            pixels = self.augment(pixels, self.seed, step // self.steps_per_epoch, chosen)
        images, padding = self.image_set.normalise(pixels), size - len(chosen)
        return ImageBatch(
            images=torch.cat([images, images.new_zeros(padding, *self.image_set.shape)]) if padding else images,
            labels=torch.cat([labels, labels.new_zeros(padding)]) if padding else labels,
            weights=torch.cat([torch.ones(len(chosen)), torch.zeros(padding)]),
            indices=torch.cat([torch.from_numpy(chosen.astype(np.int64)), torch.full((padding,), -1)]),
            count=len(whole),
        )

    def loader(
        self, coordinate: int = 0, dp: int = 1, *, workers: int | None = None, pin_memory: bool = False
    ) -> ImageLoader:
        """Reads one data-parallel coordinate's part of each global batch; see `ImageLoader`."""
        return ImageLoader(self, coordinate, dp, workers=workers, pin_memory=pin_memory)


def evaluation(
    image_set: ImageSet,
    batch: int,
    coordinate: int = 0,
    dp: int = 1,
    *,
    workers: int | None = None,
    pin_memory: bool = False,
) -> ImageLoader:
    """One data-parallel coordinate's part of a test set, in order, each image of the set once over all coordinates.

    Every coordinate gets the same number of batches of the same shape, for the collectives inside a forward pass
    have to match; what is missing is padding, with weight 0.

    Args:
        batch: images of one coordinate's forward pass.
    """
    batches = ImageBatches(image_set, batch * dp, shuffle=False, drop_last=False)
    return batches.loader(coordinate, dp, workers=workers, pin_memory=pin_memory)


class ImageLoader:
    """One data-parallel coordinate's part of each global batch, read ahead by worker processes where that helps.

    What a step gives does not depend on the workers.

    Args:
        coordinate, dp: which part, of how many equal ones.
        workers: processes that decode images ahead; None chooses 0 for images in memory, else up to 4.
        pin_memory: keep batches in page-locked memory, for an accelerator that copies from it (CUDA).

    Raises:
        DataError: the global batch cannot be cut into `dp` equal parts, or there is no such coordinate.
    """

    def __init__(
        self, batches: ImageBatches, coordinate: int, dp: int, *, workers: int | None, pin_memory: bool
    ) -> None:
        if not 0 <= coordinate < dp:
            raise DataError(f"data-parallel coordinate {coordinate} is not between 0 and {dp - 1}")
        if batches.global_batch % dp:
            raise DataError(
                f"a global batch of {batches.global_batch} images cannot be cut into {dp} equal parts: "
                f"use a multiple of {dp}"
            )
        self.batches, self.size = batches, batches.global_batch // dp
        self.first = coordinate * self.size
        self._steps = _Steps()
        usable = max(len(os.sched_getaffinity(0)) - 1, 0) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = (0 if batches.image_set.in_memory else min(4, usable)) if workers is None else workers
        self.pin_memory = pin_memory
        self._loader: torch.utils.data.DataLoader | None = None

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.batches.steps_per_epoch

    def epoch(self, epoch: int = 0, start_step: int = 0) -> Iterator[ImageBatch]:
        """The batches of an epoch from its step `start_step` on. A new call ends an earlier one's reading.

        Raises:
            DataError: an image cannot be read.
        """
        first = epoch * len(self)
        self._steps.now = range(first + start_step, first + len(self))
        if self._loader is None:
            self._loader = torch.utils.data.DataLoader(
                _Part(self.batches, self.first, self.size),
                batch_size=None,
                sampler=self._steps,
                num_workers=self.workers,
                persistent_workers=self.workers > 0,
                pin_memory=self.pin_memory,
                generator=torch.Generator(),  # the loader's own draw must not move the model's random numbers
            )
        for item in self._loader:
            if isinstance(item, UserError):
                self.close()
                try:
                    raise item
                finally:
                    del item  # else the error and this frame keep each other alive
            yield item

    def close(self) -> None:
        """End the workers. Another epoch starts new ones."""
        self._loader = None


class _Steps(torch.utils.data.Sampler):
    """The steps to read now: asked anew every epoch, while the workers live on.

    It does not know its loader: in a circle of references, a data loader's workers are not told to end and are waited
    for, 5 s each.
    """

    now = range(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _Part(torch.utils.data.Dataset):
    """Step → batch. A user's error is handed over as a value, for a worker would wrap it into its traceback."""

    def __init__(self, batches: ImageBatches, first: int, size: int) -> None:
        self.batches, self.first, self.size = batches, first, size

    def __getitem__(self, step: int) -> ImageBatch | UserError:
        try:
            return self.batches.batch(step, self.first, self.size)
        except UserError as error:
            return error
