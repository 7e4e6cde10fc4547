"""Which samples of a data set a rank reads, for a ``DataLoader`` of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mmm.data.order import epoch_order
from mmm.errors import DataError


def local_batches(
    samples: int,
    global_batch_size: int,
    first_sample: int,
    size: int,
    seed: int,
) -> Iterator[list[int]]:
    """Yield the indices of a rank's samples, one list per step, without end; use it as ``batch_sampler``.

    Every epoch has each sample at most once, in an order that depends only on the seed and the epoch. Samples at its
    end that do not fill a global batch are left out.

    Args:
        samples: number of samples in the data set.
        global_batch_size: number of samples in a step over all ranks.
        first_sample, size: this rank's samples in each global batch. Data-parallel coordinate c starts at
            ``c * size``.
        seed: seed of the order.

    Raises:
        DataError: there are fewer samples than one global batch.
    """
    if global_batch_size > samples:
        raise DataError(f"a global batch of {global_batch_size} samples, and there are {samples}: use a smaller one")
    # A generator of its own: so the error above is raised by the call, not by the first batch.
    return _batches(samples, global_batch_size, first_sample, size, seed)


def _batches(
    samples: int,
    global_batch_size: int,
    first_sample: int,
    size: int,
    seed: int,
) -> Iterator[list[int]]:
    last_start = samples - global_batch_size
    for epoch in count():
        order = epoch_order(seed, epoch, samples)
        for start in range(0, last_start + 1, global_batch_size):
            begin = start + first_sample
            yield order[begin : begin + size].tolist()
