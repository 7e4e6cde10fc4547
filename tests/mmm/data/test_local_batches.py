"""The samples of a rank, for a loader of PyTorch's."""

from itertools import chain, islice

import pytest

from mmm.data.local_batches import local_batches
from mmm.errors import DataError


def test_coordinates_share_out_the_same_global_batches():
    whole = list(islice(local_batches(20, 6, 0, 6, seed=3), 7))
    parts = [list(islice(local_batches(20, 6, first, 2, seed=3), 7)) for first in (0, 2, 4)]
    assert [list(chain(*each)) for each in zip(*parts, strict=True)] == whole
    first, second = ([*chain(*whole[:3])], [*chain(*whole[3:6])])
    assert len(set(first)) == len(set(second)) == 18  # each once at most; two are left out
    assert sorted(first) != first != second
    assert whole != list(islice(local_batches(20, 6, 0, 6, seed=4), 7))


def test_a_global_batch_that_is_too_large_is_refused_at_once():
    with pytest.raises(DataError, match="21 samples"):
        local_batches(20, 21, 0, 21, seed=0)
