"""Samples of a Zarr folder that xarray has written, also in forked workers."""

from itertools import islice

import numpy as np
import pytest
import torch
import xarray

from mmm.data import workers
from mmm.data.arrays import ArrayBatches, Arrays
from mmm.errors import DataError

pytestmark = pytest.mark.interop

# (time, lat, lon)
FIELDS = np.random.default_rng(0).standard_normal((60, 4, 8)).astype(np.float32)


@pytest.fixture(params=[2, 3], ids=["version 2", "version 3"])
def path(request, tmp_path):
    days = xarray.date_range("2000-01-01", periods=60)
    variables = {
        "t": (("time", "lat", "lon"), FIELDS, {}),
        "label": ("time", np.arange(60, dtype="int32")),
        "packed": ("time", np.linspace(0, 1, 60)),
    }
    packing = {"dtype": "int16", "scale_factor": 0.001, "_FillValue": -1}
    encoding = {"t": {"chunks": (16, 4, 8)}, "packed": packing}
    path = tmp_path / "t.zarr"
    xarray.Dataset(variables, {"time": days}).to_zarr(path, encoding=encoding, zarr_format=request.param)
    return path


def test_samples_of_a_zarr_folder(path):
    january = Arrays(path, ["t", "label", "packed"], select=slice("2000-01-11", "2000-01-31"))
    assert (len(january), january.chunk) == (21, 60)
    fields, labels, packed = january[[20, 0, 7]]
    assert np.array_equal(fields, FIELDS[[30, 10, 17]])
    assert labels.tolist() == [30, 10, 17]
    np.testing.assert_allclose(packed, np.linspace(0, 1, 60)[[30, 10, 17]], atol=0.001)


def test_a_part_of_each_sample(path):
    (rows,) = Arrays(path, ["t"], parts={"t": (slice(1, 3), slice(0, 8, 2))})[[20, 3]]
    assert np.array_equal(rows, FIELDS[[20, 3], 1:3, ::2])


def test_forked_workers_read_the_same(path):
    arrays = Arrays(path, ["t"])
    assert arrays.chunk == 16

    def batches(n_workers):
        loader = ArrayBatches(arrays, 12, 0, 12, seed=0, block=16, workers=n_workers).from_step(0)
        return [batch for (batch,) in islice(workers.read(loader, timeout=60), 5)]

    assert all(map(torch.equal, batches(0), batches(2)))


def test_a_folder_that_changes_or_has_no_such_variable(path):
    arrays = Arrays(path, ["t"])
    with pytest.raises(DataError, match=r"no variable 'u' .* label, .*t"):
        Arrays(path, ["u"])
    with pytest.raises(DataError, match="the group val cannot be opened"):
        Arrays(path, ["t"], group="val")
    (metadata,) = (path / name for name in ("zarr.json", ".zgroup") if (path / name).exists())
    metadata.write_text(metadata.read_text() + "\n")
    with pytest.raises(DataError, match="has changed since it was opened"):
        arrays[[0]]


def labelled(path, zarr_format):
    """Integers in 5 chunks, of which the last one has zeros alone, with labels 0, 10, … 90."""
    values = np.arange(1, 11, dtype="i4")
    values[8:] = 0
    dataset = xarray.Dataset({"x": ("t", values)}, {"t": np.arange(10) * 10})
    dataset.to_zarr(path, zarr_format=zarr_format, encoding={"x": {"chunks": (2,)}})
    return values


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_of_integers_that_are_not_stored_are_noted(tmp_path, zarr_format, monkeypatch):
    """They may be zeros that Zarr has left out, or lost: zeros are read."""
    notes = []
    monkeypatch.setattr("mmm.data.arrays.say_once", notes.append)
    values = labelled(tmp_path / "x.zarr", zarr_format)
    assert Arrays(tmp_path / "x.zarr", ["x"])[:][0].tolist() == values.tolist()
    (note,) = notes
    assert "x.zarr: x: 1 of 5 chunks are not stored, and are read as 0" in note


def test_what_is_appended_after_the_metadata_were_consolidated(tmp_path):
    """Version 2: .zmetadata says 10 samples, and there are 20."""
    values = labelled(tmp_path / "x.zarr", 2)
    more = xarray.Dataset({"x": ("t", values)}, {"t": np.arange(10, 20) * 10})
    more.to_zarr(tmp_path / "x.zarr", append_dim="t", consolidated=False)
    assert len(Arrays(tmp_path / "x.zarr", ["x"])) == 20
    (values,) = Arrays(tmp_path / "x.zarr", ["x"], select=slice(80, 110))[:]
    assert values.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_labels_of_a_group_above(tmp_path, zarr_format):
    path = tmp_path / "groups.zarr"
    xarray.Dataset(coords={"step": np.arange(20) * 2}).to_zarr(path, zarr_format=zarr_format)
    train = xarray.Dataset({"v": ("step", np.arange(20.0))})
    train.to_zarr(path, group="train", mode="a", zarr_format=zarr_format)
    (values,) = Arrays(path, ["v"], group="train", select=slice(0, 8))[:]
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_zero_is_a_label_where_it_is_only_what_zarr_fills_with(tmp_path):
    """xarray would take the 0 of Zarr's version 2 as missing, and make floats of labels."""
    import zarr

    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    array = group.create_array("label", shape=(3,), dtype="i4", fill_value=0)
    array.attrs["_ARRAY_DIMENSIONS"] = ["t"]
    array[:] = [0, 2, 1]
    (labels,) = Arrays(tmp_path / "x.zarr", ["label"])[:]
    assert (labels.tolist(), labels.dtype) == ([0, 2, 1], torch.int64)
