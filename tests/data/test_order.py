"""The computed order: each sample once, another order each epoch and seed, nothing kept."""

import numpy as np
import pytest

from mmm.data.order import permuted


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025])
def test_each_sample_once(samples):
    for epoch in range(2):
        assert sorted(permuted(place, samples, 5, epoch) for place in range(samples)) == list(range(samples))


def test_orders_differ_and_stay():
    def order(seed, epoch):
        return tuple(permuted(place, 50, seed, epoch) for place in range(50))

    assert len({order(seed, epoch) for seed in (0, 1, -1, 1 << 40) for epoch in range(4)}) == 16
    # What runs have recorded stays valid: the order of a seed never changes.
    assert order(0, 0)[:8] == (41, 43, 29, 32, 44, 42, 25, 18)


def test_a_sample_goes_anywhere():
    """Over epochs, each sample is at each place about equally often: chi-square, 15 × 15 degrees of freedom."""
    epochs, samples = 400, 16
    counts = np.zeros((samples, samples))
    for epoch in range(epochs):
        for place in range(samples):
            counts[place, permuted(place, samples, 3, epoch)] += 1
    chi_square = ((counts - epochs / samples) ** 2 / (epochs / samples)).sum()
    assert 225 - 5 * 450**0.5 < chi_square < 225 + 5 * 450**0.5


def test_neighbours_part():
    """Samples that follow each other are far apart: mean distance of two random places is a third of them."""
    samples = 10**12
    found = [permuted(place, samples, 0, 0) for place in range(400)]
    assert len(set(found)) == 400
    assert max(found) < samples
    assert 0.28 < np.abs(np.diff(found)).mean() / samples < 0.39
