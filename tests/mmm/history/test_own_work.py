"""Who the others wait for: a rank, or nobody; and the table of it."""

import numpy as np
import pytest

from mmm.history.plots.own_work import OwnWork, communication_to_computation, most_of, slow


def work(own, dt=1.0):
    rank, over = most_of(np.array(own))
    return OwnWork(np.full(len(own), dt), rank, over, np.shape(own)[1])


def test_a_rank_over_the_median_rank():
    found = slow(work([[9, 0, 0, 0], [0.1, 0.1, 0.5, 0.2], [0.1, 0.1, 0.5, 0.2]]))  # the first row is not in it
    assert (found.rank, found.rows, found.of) == (2, 2, 2)
    assert found.over == pytest.approx(0.4)
    assert slow(work([[0.5, 0.1]] * 2)).over == pytest.approx(0.4)  # of two over the other
    assert slow(work([[0.5, np.nan, 0.1]] * 2)).rank == 0


def test_nobody():
    assert slow(work([[0.1, 0.14, 0.1]] * 3)) is None  # 4 % of a step
    assert slow(work([[0.1, 0.5, 0.1], [0.1, 0.5, 0.1], [0.5, 0.1, 0.1]])) is None  # taking turns
    assert slow(work([[np.nan] * 3] * 3)) is None
    assert slow(work(np.zeros((0, 3)))) is None


def test_chance_blames_nobody():
    """Of two equal ranks one has the most in about half of the rows."""
    of_two = np.where(np.arange(41)[:, None] % 20 < 11, [0.3, 0.1], [0.1, 0.3])
    assert slow(work(of_two)) is None
    assert slow(work(np.where(np.arange(41)[:, None] % 20 < 17, [0.3, 0.1], [0.1, 0.3]))).rank == 0


def test_seconds_waited_for_each_second_of_computation():
    """Two ranks: one computes 3 s of 4, the other 1 s; the first row, which starts what is slow to start, is not in."""
    dt = np.array([[100.0, 100.0], [4.0, 4.0], [4.0, 4.0]])
    own = np.array([[1.0, 1.0], [3.0, 1.0], [3.0, 1.0]])
    assert communication_to_computation(dt, own) == pytest.approx((1 + 3) / (3 + 1))
    assert communication_to_computation(dt[:1], own[:1]) == pytest.approx(198 / 2)  # there is no other


def test_where_it_is_not_known():
    dt = np.full((3, 2), 4.0)
    assert communication_to_computation(dt, np.full((3, 2), np.nan)) is None
    assert communication_to_computation(dt[:0], dt[:0]) is None
    one = np.where([[True, False]] * 3, 2.0, np.nan)  # a rank that does not know is left out
    assert communication_to_computation(dt, one) == 1.0
