"""What is kept is what was given: every float bit, every rank, late names; and the line that is printed."""

import json
import math

import h5py
import numpy as np
import pytest
import xarray

from mmm.errors import RecordError
from mmm.history import History, finalize, load, write_config
from mmm.history.record.dataset import Columns, plain_attrs, write_dataset


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


def description(path):
    """Everything in an HDF5 file that a reader of netCDF goes by, as text, so that NaN is NaN."""
    hidden = ("DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties")

    def attributes(of):
        named = {name: sorted(at.split()) if name == "coordinates" else at for name, at in of.attrs.items()}
        return {name: repr(value) for name, value in sorted(named.items()) if name not in hidden}

    with h5py.File(path) as file:
        return {"/": attributes(file)} | {
            name: (str(of.dtype), repr(of[()]), of.is_scale or [dim[0].name for dim in of.dims], attributes(of))
            for name, of in file.items()
        }


@pytest.mark.parametrize(("rows", "by_rank"), [(3, True), (1, False), (0, True)])
def test_the_file_is_the_one_that_xarray_writes(rows, by_rank, tmp_path):
    """Values, types, attributes, dimension scales, and which coordinates belong to what."""
    column = np.linspace(0, 1, rows * 2).reshape(rows, 2)
    columns = Columns(
        {
            "loss": ("draw", np.array([1.5, math.nan, math.inf][:rows]), {"long_name": "training loss"}),
            "iter": ("draw", np.arange(rows), {"long_name": "optimizer step"}),
        }
        | ({"dt": (("draw", "rank"), column, {"units": "s"})} if by_rank else {}),
        {
            "draw": ("draw", np.arange(rows), {"long_name": "logged row"}),
            "rank": ("rank", np.arange(2)),
            "host": ("rank", np.array(["x0", "xäöü1"])),
            "axis_tp": ("rank", np.array([0, 1])),
        },
        {"state": "finished", "world_size": 2, "learning_rate": 0.1, "config": "{}"},
    )
    write_dataset(columns, tmp_path / "ours.h5")
    dataset = columns.dataset()
    exact = {str(name): {"_FillValue": None} for name in dataset.variables}
    dataset.to_netcdf(tmp_path / "theirs.h5", engine="h5netcdf", encoding=exact)
    assert description(tmp_path / "ours.h5") == description(tmp_path / "theirs.h5")
    xarray.testing.assert_identical(xarray.load_dataset(tmp_path / "ours.h5", engine="h5netcdf"), dataset)


def test_ranks_are_coordinates(tmp_path):
    with History(tmp_path, ranks=ranks(8)) as history:
        history.update({}, {"dt": [float(r) for r in range(8)]})
    ds = load(tmp_path)
    assert set(map(str, ds.coords)) == {"draw", "rank", "host", "local_rank", "pid", "axis_dp_shard", "axis_tp"}
    assert ds["host"].values.tolist() == ["x0"] * 4 + ["x1"] * 4
    assert ds["axis_tp"].values.tolist() == [0, 1] * 4
    assert ds["dt"].where(ds["axis_tp"] == 1, drop=True).values.tolist() == [[1.0, 3.0, 5.0, 7.0]]


def test_ints_stay_ints_only_if_all_are(tmp_path):
    with History(tmp_path, ranks=ranks(2)) as history:
        history.update({"iter": 2**62, "tokens": 7, "mixed": 1, "flag": True, "big": 2**70}, {"bytes": [1, 2]})
        history.update(
            {"iter": 2**62 + 1, "tokens": np.int32(9), "mixed": 1.5, "flag": False, "big": 1}, {"bytes": [3, 4]}
        )
    ds = load(tmp_path)
    assert {name: str(ds[name].dtype) for name in ds.data_vars} == {
        "iter": "int64",
        "tokens": "int64",
        "mixed": "float64",
        "flag": "int64",
        "big": "float64",
        "bytes": "int64",
    }
    assert ds["iter"].values.tolist() == [2**62, 2**62 + 1]
    assert ds["bytes"].values.tolist() == [[1, 2], [3, 4]]


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


class Scalar:
    """What a tensor of one element looks like."""

    def item(self):
        return 2.5


@pytest.mark.parametrize(
    ("row", "per_rank", "says"),
    [
        ({"loss": "low"}, None, r"loss='low' is not a number"),
        ({"loss": None}, None, r"loss=None is not a number"),
        ({"val/loss": 1.0}, None, r"'val/loss' cannot name.*val_loss"),
        ({"host": 1.0}, None, r"'host' is a coordinate"),
        ({"axis_tp": 1.0}, None, r"'axis_tp' is a coordinate"),
        ({}, {"dt": [1.0]}, r"'dt'\] has 1 values, and this run has 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, row, per_rank, says):
    with History(tmp_path, ranks=ranks(2)) as history:
        with pytest.raises(RecordError, match=says):
            history.update(row, per_rank)
        history.update({"loss": 1.0})
    assert load(tmp_path).sizes["draw"] == 1


def test_no_rows_is_a_dataset_too(tmp_path):
    with History(tmp_path, ranks=ranks(2)):
        assert load(tmp_path).sizes == {"draw": 0, "rank": 2}
    assert load(tmp_path).sizes == {"draw": 0, "rank": 2}
    with h5py.File(tmp_path / "train_dataset.h5") as file:
        assert file["draw"].shape == (0,)


def test_attributes(tmp_path):
    write_config(tmp_path, {"tp": 2, "note": "π" * 100_000})  # more than the 64 KiB of a plain HDF5 attribute
    with History(tmp_path, ranks=ranks(2)) as history:
        history.update({"dt": 1.0, "dtf": 1.0, "sps": 2.0, "tps_device": 3.0, "loss": 4.0}, {"dtw": [1.0, 2.0]})
    ds = load(tmp_path)
    units = {name: var.attrs.get("units") for name, var in ds.data_vars.items()}
    assert units == {"dt": "s", "dtf": "s", "dtw": "s", "sps": "samples/s", "tps_device": "tokens/s", "loss": None}
    assert ds["dt"].attrs["long_name"] == "time of a step"
    assert json.loads(ds.attrs["config"])["tp"] == 2
    assert ds.attrs["world_size"] == 2
    assert plain_attrs({"ok": True, "none": None, "n": 3, "a": ["b"]}) == {
        "ok": "true",
        "none": "null",
        "n": 3,
        "a": '["b"]',
    }


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
