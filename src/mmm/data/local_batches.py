"""Which samples of a data set a rank takes, for a ``DataLoader`` of PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mmm.data.order import epoch_order
from mmm.errors import DataError


def local_batches(samples: int, global_batch_size: int, first_sample: int, size: int, seed: int) -> Iterator[list[int]]:
    """The numbers of a rank's samples, a list a step, without end: a ``batch_sampler``.

    Every epoch has each sample once at most, in an order of its own, which depends on the seed alone; what does not
    fill a global batch at its end is left out.

    Args:
        samples: in the data set.
        first_sample, size: the local batch of data-parallel coordinate c starts at ``c * size`` of each global batch.

    Raises:
        DataError: there are fewer samples than one global batch.
    """
    if global_batch_size > samples:
        raise DataError(f"a global batch of {global_batch_size} samples, and there are {samples}: use a smaller one")
    return (
        epoch_order(seed, epoch, samples)[start + first_sample :][:size].tolist()
        for epoch in count()
        for start in range(0, samples - global_batch_size + 1, global_batch_size)
    )
