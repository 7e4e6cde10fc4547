"""The computed order: each sample once, another order each epoch and seed, nothing kept."""

import pytest

from mmm.data.order import permuted


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025])
def test_each_sample_once(samples):
    for epoch in range(2):
        assert sorted(permuted(place, samples, 5, epoch) for place in range(samples)) == list(range(samples))
