"""Bytes and seconds as people read them. NaN is further off than any number, wherever it stands."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import xarray

from mmm.comparison import relative_error, worst
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


@pytest.mark.parametrize("place", range(3))
def test_nan_is_the_worst(place):
    differences = [0.0, math.inf, 1e-9]
    differences[place] = math.nan
    assert math.isnan(worst(differences))
    assert worst(enumerate(differences), key=lambda item: item[1])[0] == place


def test_the_largest_of_numbers():
    assert worst([0.5, 2.0, 1.0]) == 2.0
    assert worst({"first": 1.0, "second": math.inf}.items(), key=lambda item: item[1]) == ("second", math.inf)


def test_nothing_compared_is_no_success():
    with pytest.raises(ValueError, match="empty"):
        worst([])


def test_relative_error():
    np.testing.assert_equal(
        [relative_error(1.5, -1.0), relative_error(0.25, 0.0), relative_error(1.0, math.nan)], [2.5, 0.25, math.nan]
    )


def test_a_disturbed_run_whose_loss_is_nan_differs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    disturbed = importlib.import_module("disturbed")
    curves = {"killed": [1.0, math.nan], "undisturbed": [1.0, 2.0]}
    datasets = {
        name: xarray.Dataset({"iter": ("draw", [0, 1]), "loss": ("draw", loss)}) for name, loss in curves.items()
    }
    monkeypatch.setattr(disturbed, "load", datasets.get)
    far, wrong = disturbed.difference("killed", "undisturbed", 1e-9)
    assert math.isnan(far)
    assert wrong == ["the curves differ by nan"]
