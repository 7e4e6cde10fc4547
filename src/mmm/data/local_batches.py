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
    block: int = 1,
    *,
    first_step: int = 0,
) -> Iterator[list[int]]:
    """Yield the indices of a rank's samples, one list per step, without end; use it as ``batch_sampler``.

    Every epoch has each sample at most once, in an order that depends only on the seed, the epoch and `block`. Samples
    at its end that do not fill a global batch are left out.

    Args:
        samples: number of samples in the data set.
        global_batch_size: number of samples in a step over all ranks.
        first_sample, size: this rank's samples in each global batch. Data-parallel coordinate c starts at
            ``c * size``.
        seed: seed of the order.
        block: number of consecutive samples that stay together in the order. 1 shuffles freely.
        first_step: index of the step that the first list is for.

    Raises:
        DataError: there are fewer samples than one global batch, a block has no sample, or the rank's samples do not
            lie in the global batch.
    """
    if block < 1:
        raise DataError(f"a block of {block} samples: use 1 or more")
    if global_batch_size > samples:
        raise DataError(
            f"a global batch of {global_batch_size} samples, and there are {samples}: use a smaller one, or fewer "
            f"data-parallel ranks"
        )
    if size < 1 or first_sample < 0 or first_sample + size > global_batch_size:
        raise DataError(
            f"the samples {first_sample} to {first_sample + size - 1} of a global batch of {global_batch_size}: a rank "
            f"has one or more, and they lie in it"
        )
    # A generator of its own: so the error above is raised by the call, not by the first batch.
    return _batches(samples, global_batch_size, first_sample, size, seed, block, first_step)


def _batches(
    samples: int,
    global_batch_size: int,
    first_sample: int,
    size: int,
    seed: int,
    block: int,
    first_step: int,
) -> Iterator[list[int]]:
    steps_per_epoch = samples // global_batch_size
    for step in count(first_step):
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        # Made once an epoch: the function keeps the last orders.
        order = epoch_order(seed, epoch, samples, block)
        begin = step_of_epoch * global_batch_size + first_sample
        yield order[begin : begin + size].tolist()
