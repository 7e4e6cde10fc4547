"""Bytes and seconds as people read them."""

import pytest

from mmm.units import GIB, MIB, counted, duration, size


@pytest.mark.parametrize(
    ("seconds", "text", "exact", "short"),
    [
        (0.2, "0 s", "0.2 s", "0s"),
        (59, "59 s", "59.0 s", "59s"),
        (240, "4 min", "4.0 min", "4m"),
        (5400, "1.5 h", "1.5 h", "1.5h"),
        (180000, "2.1 days", "2.1 days", "2.1d"),
    ],
)
def test_durations(seconds, text, exact, short):
    assert (duration(seconds), duration(seconds, 1), duration(seconds, short=True)) == (text, exact, short)


@pytest.mark.parametrize(
    ("count", "text", "exact"),
    [
        (8, "8 B", "0.00 MiB"),
        (65_536, "64 KiB", "0.06 MiB"),
        (1.5 * MIB, "1.5 MiB", "1.50 MiB"),
        (1000 * MIB, "0.977 GiB", "1,000.00 MiB"),
        (1234 * GIB, "1,234 GiB", "1,234.00 GiB"),
    ],
)
def test_sizes(count, text, exact):
    assert (size(count), size(count, 2)) == (text, exact)


def test_a_number_with_its_noun():
    assert counted(1, "rank") == "1 rank"
    assert counted(0, "rank") == "0 ranks"
    assert counted(2000, "process", "processes") == "2,000 processes"
