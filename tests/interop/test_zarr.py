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
