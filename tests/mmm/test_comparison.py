"""NaN is further off than any number, wherever it stands."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import xarray

from mmm.comparison import relative_error, worst


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
