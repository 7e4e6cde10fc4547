"""The ratio of communication to computation of a run."""

import numpy as np
import pytest

from mmm.history.waiting import communication_to_computation


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
