"""What a file means and what it lacks: missing values of netCDF, labels, calendars, parts that are not stored."""

import os
import subprocess
import sys
from types import SimpleNamespace

import h5netcdf
import h5py
import numpy as np
import pytest
import torch
import xarray

from mmm.data.array_storage import missing_in_hdf5
from mmm.data.arrays import ArrayBatches, Arrays
from mmm.errors import DataError
from mmm.layout import Layout
from mmm.run import options
from mmm.trainer import start_run
from support.pool import program_on

FLOAT_FILL = 9.969209968386869e36


def everything(arrays):
    return [values.tolist() for values in arrays[:]]


# Values that a netCDF library takes as missing.


def netcdf(path, name, values, **attributes):
    """A file that a netCDF library has written, with one variable along ``time``."""
    with h5netcdf.File(path, "w") as file:
        file.dimensions = {"time": len(values)}
        variable = file.create_variable(name, ("time",), values.dtype)
        variable[:] = values
        variable.attrs.update(attributes)
    return path


@pytest.mark.parametrize(
    ("dtype", "fill"), [("f4", FLOAT_FILL), ("f8", FLOAT_FILL), ("i2", -32767), ("u2", 65535), ("u8", 2**64 - 2)]
)
def test_the_default_fill_value_of_netcdf_is_not_read_as_data(tmp_path, dtype, fill):
    """In plain HDF5 the same number is data, and a byte has no default."""
    values = np.array([1, fill, 3], dtype)
    path = netcdf(tmp_path / "x.nc", "x", values)
    with pytest.raises(DataError, match=r"x.nc: sample 1 of x has 1 of 1 values that are missing"):
        Arrays(path, ["x"])[:]
    assert everything(Arrays(path, ["x"], missing=7)) == [[1, 7, 3]]
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"] = values
    if dtype != "u8":
        assert everything(Arrays(tmp_path / "plain.h5", ["x"])) == [values.tolist()]


def test_a_file_of_an_old_library_has_its_default_fill_value(tmp_path):
    """Before 2016 a file did not say who wrote it. The values that were never written were read as data."""
    with h5py.File(tmp_path / "old.nc", "w") as file:
        file.create_dataset("x", (3,), "f4", fillvalue=FLOAT_FILL)[:2] = [1, 2]
    assert everything(Arrays(tmp_path / "old.nc", ["x"], missing=7)) == [[1, 2, 7]]


def test_bytes_have_no_default_fill_value(tmp_path):
    path = netcdf(tmp_path / "x.nc", "x", np.array([1, -127], "i1"))
    assert everything(Arrays(path, ["x"])) == [[1, -127]]


# dtype, attributes, and what is read of 1, 2, 3, 4 where 9 stands for missing.
LIMITED = {
    "from and to": ("i2", {"valid_min": np.int16(2), "valid_max": np.int16(3)}, [9, 2, 3, 9]),
    "a range": ("f4", {"valid_range": np.array([2, 3], "f4")}, [9, 2, 3, 9]),
    # The limit is of the stored integers, not of what they stand for.
    "packed": ("i2", {"valid_max": np.int16(3), "scale_factor": 2.0}, [2, 4, 6, 9]),
    "in units of unpacked values": ("i2", {"valid_max": 6.0, "scale_factor": 2.0}, [2, 4, 6, 9]),
}


@pytest.mark.parametrize(("dtype", "attributes", "expected"), LIMITED.values(), ids=LIMITED)
def test_values_out_of_the_valid_range_are_missing(tmp_path, dtype, attributes, expected):
    path = netcdf(tmp_path / "x.nc", "x", np.array([1, 2, 3, 4], dtype), **attributes)
    assert everything(Arrays(path, ["x"], missing=9)) == [expected]


def test_integers_that_int64_has_not(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.array([1, 2**63 - 1, 2**63], "u8")
    arrays = Arrays(tmp_path / "x.h5", ["x"])
    assert arrays[:2][0].tolist() == [1, 2**63 - 1]
    with pytest.raises(DataError, match=r"integers such as 9223372036854775808"):
        arrays[:]


def test_integers_take_only_an_integer_for_missing(tmp_path):
    path = netcdf(tmp_path / "x.nc", "x", np.array([1, -32767], "i2"))
    with pytest.raises(DataError, match=r"missing=0.5"):
        Arrays(path, ["x"], missing=0.5)[:]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"scale_factor": 2.0, "add_offset": "0.5"}, "add_offset': '0.5'"),
        pytest.param(
            {"scale_factor": np.longdouble(2)},
            "PyTorch has no float128",
            marks=pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 makes float64 of the product"),
        ),
        ({"scale_factor": "2"}, "scale_factor': '2'"),
        ({"valid_range": "0 to 5"}, "valid_range': '0 to 5'"),
        ({"valid_min": "0"}, "valid_min': '0'"),
        ({"valid_range": [1, 2, 3]}, "valid_range': array"),
        ({"scale_factor": [1.0, 2.0]}, "scale_factor': array"),
        ({"scale_factor": np.nan}, "scale_factor': .*nan"),
        ({"_FillValue": "NaN"}, "_FillValue': 'NaN'"),
        ({"_Unsigned": "true", "valid_max": np.int16(-1)}, "_Unsigned': 'true'"),
    ],
)
def test_attributes_that_are_no_numbers(tmp_path, attributes, message):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3, dtype="i2")
        file["x"].attrs.update(attributes)
    with pytest.raises(DataError, match=rf"x\.h5: x is int16 with .*{message}"):
        Arrays(tmp_path / "x.h5", ["x"])


def test_a_scale_factor_that_is_an_array_of_one(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3, dtype="i2")
        file["x"].attrs["scale_factor"] = np.array([0.5])
    assert everything(Arrays(tmp_path / "x.h5", ["x"])) == [[0, 0.5, 1]]


# Labels.


def with_groups(path):
    """Labels 0, 2, … 38 in the root, which the variable in the group ``train`` shares; and a dimension of its own."""
    with h5netcdf.File(path, "w") as file:
        file.dimensions = {"step": 20, "other": 20}
        file.create_variable("step", ("step",), data=np.arange(20) * 2)
        file.create_variable("train/v", ("step",), data=np.arange(20.0))
        file.create_variable("train/w", ("other",), data=np.arange(20.0))
    return path


def test_labels_of_a_group_above(tmp_path):
    """They were taken as positions."""
    path = with_groups(tmp_path / "groups.nc")
    arrays = Arrays(path, ["v"], group="train", select=slice(0, 8))
    assert everything(arrays) == [[0, 1, 2, 3, 4]]


def test_dimensions_of_one_length_are_not_one_dimension(tmp_path):
    path = with_groups(tmp_path / "groups.nc")
    with pytest.raises(DataError, match="v has 20 along /step, w has 20 along /other"):
        Arrays(path, ["v", "w"], group="train")


def test_labels_out_of_order(tmp_path):
    """A slice of labels that are not sorted has others in it."""
    path = tmp_path / "x.nc"
    xarray.Dataset({"x": ("t", np.arange(4.0))}, {"t": [0, 5, 1, 2]}).to_netcdf(path, engine="h5netcdf")
    with pytest.raises(DataError, match="the labels of t are not in order"):
        Arrays(path, ["x"], select=slice(0, 2))
    assert len(Arrays(path, ["x"])) == 4


def test_what_nobody_asks_for_need_not_be_readable(tmp_path):
    """A time without a sensible unit, a link to a lost file, texts of any length, a reference as an attribute."""
    path = tmp_path / "x.nc"
    odd = ("n", np.arange(2.0), {"units": "fortnights since yesterday"})
    xarray.Dataset({"x": ("t", np.arange(3.0)), "odd": odd}).to_netcdf(path, engine="h5netcdf")
    with h5py.File(path, "r+") as file:
        file["link"] = h5py.ExternalLink("lost.h5", "/x")
        file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.int32))
        file["x"].attrs["see"] = file["odd"].ref
    assert everything(Arrays(path, ["x"])) == [[0, 1, 2]]
    with pytest.raises(DataError, match=r"link in the group / cannot be read"):
        Arrays(path, ["link"])
    with pytest.raises(DataError, match=r"odd is .* fortnights since yesterday"):
        Arrays(path, ["odd"])


def by_calendar(path, calendar, years=12):
    """A value a day; days are counted as the calendar counts them: 365 or 360 a year."""
    per_year = {"noleap": 365, "360_day": 360, "all_leap": 366}[calendar]
    days = years * per_year
    attributes = {"units": "days since 1999-01-01", "calendar": calendar}
    dataset = xarray.Dataset({"x": ("time", np.arange(days))}, {"time": ("time", np.arange(days), attributes)})
    dataset.to_netcdf(path, engine="h5netcdf")
    return per_year


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "all_leap"])
def test_dates_of_the_calendars_of_climate_models(tmp_path, calendar):
    """Without cftime in the environment this test fails: it is one of the packages of the tests."""
    path = tmp_path / "model.nc"
    per_year = by_calendar(path, calendar)
    arrays = Arrays(path, ["x"], select=slice("2000", "2009"))
    assert everything(arrays) == [list(range(per_year, 11 * per_year))]


def test_a_calendar_without_its_package(tmp_path, monkeypatch):
    """Only labels need it."""
    path = tmp_path / "model.nc"
    by_calendar(path, "noleap", 2)
    monkeypatch.setitem(sys.modules, "cftime", None)
    # An older xarray has imported it already.
    monkeypatch.setattr("xarray.coding.times.cftime", None, raising=False)
    assert len(Arrays(path, ["x"])) == 730
    with pytest.raises(DataError, match=r"noleap.*pip install 'mmm\[calendars\]'"):
        Arrays(path, ["x"], select=slice("2000", "2009"))


# What is not stored.


def virtual(folder):
    """Samples 0 to 2 are 1, in part0.h5, and 3 to 5 are 2, in part1.h5."""
    layout = h5py.VirtualLayout((6, 2), "f4")
    for i in range(2):
        with h5py.File(folder / f"part{i}.h5", "w") as file:
            file["x"] = np.full((3, 2), i + 1, "f4")
        layout[3 * i : 3 * i + 3] = h5py.VirtualSource(f"part{i}.h5", "x", (3, 2))
    with h5py.File(folder / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return folder / "all.h5"


def source_gone(folder):
    (folder / "part1.h5").rename(folder / "elsewhere.h5")


def source_without_it(folder):
    with h5py.File(folder / "part1.h5", "w") as file:
        file["y"] = np.full((3, 2), 2, "f4")


def source_half_written(folder):
    with h5py.File(folder / "part1.h5", "w") as file:
        file.create_dataset("x", (3, 2), "f4", chunks=(1, 2))[0] = 2


@pytest.mark.parametrize("spoil", [source_gone, source_without_it, source_half_written])
def test_a_virtual_array_without_one_of_its_sources(tmp_path, spoil):
    """HDF5 reads zeros in its place. Samples of the other source are read."""
    path = virtual(tmp_path)
    assert Arrays(path, ["x"])[:][0][:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    spoil(tmp_path)
    with pytest.raises(DataError, match=r"all.h5: x is not complete: its source part1.h5"):
        Arrays(path, ["x"])
    assert len(Arrays(path, ["x"], select=slice(0, 3))) == 3


def test_a_virtual_array_with_a_gap(tmp_path):
    virtual(tmp_path)
    layout = h5py.VirtualLayout((6, 2), "f4")
    layout[:3] = h5py.VirtualSource(tmp_path / "part0.h5", "x", (3, 2))
    with h5py.File(tmp_path / "gap.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(DataError, match="sources have 6 of 12 values"):
        Arrays(tmp_path / "gap.h5", ["x"])


def test_a_virtual_array_whose_source_has_no_end(tmp_path):
    """HDF5 makes the array as long as what it finds, so nobody knows what is lost."""
    layout = h5py.VirtualLayout((3, 2), "f4", maxshape=(None, 2))
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file.create_dataset("x", data=np.ones((3, 2), "f4"), maxshape=(None, 2))
    source = h5py.VirtualSource("part.h5", "x", (3, 2), maxshape=(None, 2))
    layout[0 : h5py.h5s.UNLIMITED] = source[0 : h5py.h5s.UNLIMITED]
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(DataError, match=r"its source part.h5 has no end"):
        Arrays(tmp_path / "all.h5", ["x"])


def test_a_part_of_a_virtual_array_that_its_source_has_lost(tmp_path):
    """The source has more values than are read of it, but not those."""
    layout = h5py.VirtualLayout((2, 1), "f4")
    layout[:] = h5py.VirtualSource("part.h5", "x", (6, 1))[4:6]
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["x"] = np.ones((5, 1), "f4")
    with pytest.raises(DataError, match=r"its source part.h5, x: it is of shape \(5, 1\)"):
        Arrays(tmp_path / "all.h5", ["x"])


class OldLibrary:
    """A data set of h5py that was built with an HDF5 before 1.12.3."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.id = SimpleNamespace(
            get_num_chunks=dataset.id.get_num_chunks,
            get_chunk_info=dataset.id.get_chunk_info,
        )

    def __getattr__(self, name):
        return getattr(self.dataset, name)


def test_chunks_are_counted_by_an_older_library_too(tmp_path):
    with h5py.File(tmp_path / "half.h5", "w") as file:
        dataset = file.create_dataset("x", (10, 4), "f4", chunks=(2, 2))
        dataset[:6] = 1
        for array in (dataset, OldLibrary(dataset)):
            assert missing_in_hdf5(array, 0, 10) == "6 of 10 chunks are written"
            assert missing_in_hdf5(array, 0, 6) == ""


def test_chunks_that_nobody_has_written(tmp_path):
    """A program that stopped half way. Where the fill value is NaN, it is found by the sample."""
    path = tmp_path / "half.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 4), "f4", chunks=(2, 2))[:6] = 1
        file.create_dataset("never", (10, 4), "f4")
        file.create_dataset("nan", (10, 4), "f4", chunks=(2, 4), fillvalue=np.nan)[:6] = 1
    with pytest.raises(DataError, match=r"half.h5: x is not complete: 6 of 10 chunks are written; .* read as 0"):
        Arrays(path, ["x"])
    assert Arrays(path, ["x"], select=slice(0, 6))[:][0].sum() == 24
    with pytest.raises(DataError, match="never is not complete: nothing is written"):
        Arrays(path, ["never"])
    with pytest.raises(DataError, match="sample 6 of nan has 4 of 4 values"):
        Arrays(path, ["nan"])[:]


def test_external_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("x", (6, 2), "f4", external=[("raw.bin", 0, 48)])[:] = 1
    with pytest.raises(DataError, match=r"x is not complete: it is stored in external files"):
        Arrays("x.h5", ["x"])


def test_a_file_that_is_open_for_writing(tmp_path):
    path = tmp_path / "x.h5"
    script = (
        f"import h5py, sys; file = h5py.File({str(path)!r}, 'w'); file['x'] = [1.0]; file.flush(); "
        f"print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        with pytest.raises(DataError, match=r"x.h5 cannot be opened .* locked: .*HDF5_USE_FILE_LOCKING"):
            Arrays(path, ["x"])
        writer.stdin.close()


def test_a_file_written_anew_at_its_very_size(tmp_path):
    """The same size and the same inode, one nanosecond later: what was read may be of both."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4.0)
    arrays = Arrays(path, ["x"])
    before = path.stat()
    with h5py.File(path, "r+") as file:
        # In place.
        file["x"][:] = 7
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    with pytest.raises(DataError, match="has changed since it was opened"):
        arrays[:]


# Indices and batches.


@pytest.fixture
def arrays(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["x"] = np.arange(6.0)
        file["q"] = np.arange(6).astype(np.longdouble)
    return Arrays(tmp_path / "p.h5", ["x"])


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [5, 3, 1]),
        (np.array([True, False, False, False, False, True]), [0, 5]),
        (torch.tensor([True, False, False, False, True, False]), [0, 4]),
        (torch.tensor(2), 2),
        (torch.tensor([2, 0]), [2, 0]),
        (np.uint8(3), 3),
        (-1, 5),
        ([], []),
    ],
    ids=str,
)
def test_an_index_means_what_it_means_to_numpy(arrays, index, expected):
    assert arrays[index][0].tolist() == expected


@pytest.mark.parametrize("index", [1.0, [1.7], [True, False], True, [[0, 1]], "1", None], ids=str)
def test_an_index_that_is_none(arrays, index):
    with pytest.raises(DataError, match=r"p.h5: an index of samples is"):
        arrays[index]


@pytest.mark.parametrize(
    ("variables", "select", "message"),
    [(["q"], None, "q is float128"), (["x"], 2, "select=2"), (["x"], [0, 1], "select=")],
)
def test_arguments_that_do_not_fit(arrays, variables, select, message):
    with pytest.raises(DataError, match=message):
        Arrays(arrays.path, variables, select=select)


@pytest.mark.parametrize(("global_batch", "first", "size"), [(0, 0, 0), (3, 2, 3), (3, -1, 2), (3, 0, 0)])
def test_a_rank_has_samples_of_its_own_global_batch(arrays, global_batch, first, size):
    """Those beyond it are of the next one."""
    with pytest.raises(DataError, match=f"global batch of {global_batch}"):
        ArrayBatches(arrays, global_batch, first, size, seed=0)


# What the ranks have in common.


def test_a_digest_tells_files_and_selections_apart(tmp_path):
    def write(name, values, **attributes):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = values
            file["x"].attrs.update(attributes)
        return tmp_path / name

    path = write("a.h5", np.arange(40.0))
    own = Arrays(path, ["x"])
    others = [
        Arrays(path, ["x"], select=slice(0, 39)),
        Arrays(path, ["x"], missing=0.0),
        Arrays(path, ["x"], dtype=torch.float32),
        Arrays(write("shorter.h5", np.arange(32.0)), ["x"]),
        Arrays(write("later.h5", np.arange(40.0) + 1), ["x"]),
        Arrays(write("scaled.h5", np.arange(40.0), scale_factor=2.0), ["x"]),
    ]
    assert Arrays(write("same.h5", np.arange(40.0)), ["x"]).digest() == own.digest()
    assert len({arrays.digest() for arrays in [own, *others]}) == 7


def refusal_on(rank, folder):
    """What this rank hears when its loop begins. Rank 1 has an older copy of the file, of 32 samples."""
    n_samples = 40 if rank.rank == 0 else 32
    path = folder / str(rank.rank) / "x.h5"
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(float(n_samples))
    config = options.RunFlags(device="cpu", outdir=folder / "run")
    with program_on(rank), start_run("differ", config, Layout().fit(2)) as run:
        batches = ArrayBatches(Arrays(path, ["x"]), 8, 4 * rank.rank, 4, seed=0)
        try:
            next(run.steps(batches, 4, samples=8))
        except DataError as error:
            return str(error), error.on_every_rank
    return None


def test_ranks_with_different_files_are_refused_at_the_start(run_on_ranks, tmp_path):
    """A stale copy on a host: they trained on some samples twice, and on others never."""
    for text, on_every_rank in run_on_ranks(refusal_on, 2, tmp_path):
        assert "x.h5 with 40 samples" in text
        assert "x.h5 with 32 samples" in text
        assert "on rank 1" in text
        assert on_every_rank
