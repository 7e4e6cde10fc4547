"""What is kept is what was given: every float bit, every rank, late names; and the line that is printed."""

import math

import h5py
import numpy as np
import pytest
import xarray

from mmm.errors import RecordError
from mmm.history import History, finalize, load


def ranks(count):
    return [
        {"rank": r, "local_rank": r % 4, "host": f"x{r // 4}", "pid": 100 + r, "dp_shard": r // 2, "tp": r % 2}
        for r in range(count)
    ]


def bits(values):
    return np.asarray(values, dtype=np.float64).view(np.uint64).tolist()


def test_round_trip_is_exact_by_both_readers(tmp_path):
    random = np.random.default_rng(0)
    loss = [*random.standard_normal(50), 5e-324, 1.7976931348623157e308, -0.0, 0.1 + 0.2, math.inf, -math.inf, math.nan]
    dt = random.random((len(loss), 8))
    with History(tmp_path, ranks=ranks(8), flush_every=7) as history:
        for step, value in enumerate(loss):
            history.update({"iter": step, "loss": value}, {"dt": dt[step].tolist()})
        live = load(tmp_path)  # what is flushed of a run that goes on
        assert live.sizes["draw"] == 56
    assert not (tmp_path / "journal.jsonl").exists()
    for dataset in (load(tmp_path), xarray.open_dataset(tmp_path / "train_dataset.h5", engine="h5netcdf")):
        assert bits(dataset["loss"].values) == bits(loss)
        assert bits(dataset["dt"].values) == bits(dt)
        assert dataset["dt"].dims == ("draw", "rank")
        assert dataset["dt"].dtype == dataset["loss"].dtype == np.float64
        assert dataset["iter"].dtype == dataset["draw"].dtype == np.int64
        assert dataset["draw"].values.tolist() == dataset["iter"].values.tolist() == list(range(len(loss)))
        dataset.close()
    with h5py.File(tmp_path / "train_dataset.h5") as file:
        assert bits(file["loss"][:]) == bits(loss)
        assert bits(file["dt"][:]) == bits(dt)
        assert file["host"][5] == b"x1"
    assert bits(live["loss"].values) == bits(loss[:56])


def test_ranks_are_coordinates(tmp_path):
    with History(tmp_path, ranks=ranks(8)) as history:
        history.update({}, {"dt": [float(r) for r in range(8)]})
    ds = load(tmp_path)
    assert set(map(str, ds.coords)) == {"draw", "rank", "host", "local_rank", "pid", "axis_dp_shard", "axis_tp"}
    assert ds["host"].values.tolist() == ["x0"] * 4 + ["x1"] * 4
    assert ds["axis_tp"].values.tolist() == [0, 1] * 4
    assert ds["dt"].where(ds["axis_tp"] == 1, drop=True).values.tolist() == [[1.0, 3.0, 5.0, 7.0]]


def test_many_ranks_are_reduced(tmp_path):
    times = np.random.default_rng(1).random((3, 65))
    times[1, 40] = 9.0
    times[2, 3] = np.nan
    with History(tmp_path, ranks=ranks(65)) as history:
        for row in times:
            history.update({"dt": 0.0}, {"dt": row})
        history.update({}, {"dt": [math.nan] * 65})
    ds = load(tmp_path)
    assert set(map(str, ds.data_vars)) == {"dt_min", "dt_median", "dt_max", "dt_argmax"}
    assert bits(ds["dt_median"].values[:3]) == bits(np.nanmedian(times, axis=1))
    assert bits(ds["dt_min"].values[:3]) == bits(np.nanmin(times, axis=1))
    assert bits(ds["dt_max"].values[:3]) == bits(np.nanmax(times, axis=1))
    assert ds["dt_argmax"].values.tolist() == [int(np.argmax(times[0])), 40, int(np.nanargmax(times[2])), -1]
    assert ds["dt_argmax"].dtype == np.int64
    assert np.isnan(ds["dt_max"].values[3])
    assert ds["host"].values[40] == "x10"  # so that the slow rank can be found


def test_no_rows_is_a_dataset_too(tmp_path):
    with History(tmp_path, ranks=ranks(2)):
        assert load(tmp_path).sizes == {"draw": 0, "rank": 2}
    assert load(tmp_path).sizes == {"draw": 0, "rank": 2}
    with h5py.File(tmp_path / "train_dataset.h5") as file:
        assert file["draw"].shape == (0,)


def test_close_twice_and_no_row_after(tmp_path):
    history = History(tmp_path, ranks=ranks(2))
    history.update({"loss": 1.0})
    path = history.close()
    before = path.read_bytes()
    assert history.close() == path == tmp_path / "train_dataset.h5"
    assert path.read_bytes() == before
    with pytest.raises(RecordError, match="is closed"):
        history.update({"loss": 2.0})
    assert finalize(tmp_path) == path


def test_rows_that_are_there_are_not_overwritten(tmp_path):
    with History(tmp_path, ranks=ranks(2)) as history:
        history.update({"loss": 1.0})
    with pytest.raises(RecordError, match="already holds rows"):
        History(tmp_path, ranks=ranks(2))
    assert load(tmp_path).sizes["draw"] == 1
