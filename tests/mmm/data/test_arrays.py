"""Samples from files of arrays: what is read, in which order, how much of the file, and what is refused."""

import os
import pickle
import sys
import threading
from itertools import islice
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray
from packaging.version import Version
from torch.utils.data import ConcatDataset, DataLoader, Subset

from mmm.data import workers
from mmm.data.arrays import ArrayBatches, Arrays
from mmm.data.local_batches import local_batches
from mmm.data.order import epoch_order
from mmm.errors import DataError, UserError
from mmm.parallel.cp.space.strips import own_rows, own_slice

SAMPLES = 96
SHAPE = (8, 32)
# (samples, *SHAPE)
FIELDS = np.random.default_rng(0).standard_normal((SAMPLES, *SHAPE)).astype(np.float32)
LABELS = np.arange(SAMPLES, dtype=np.int32)
# Ways in which HDF5 lays an array out.
STORED = {
    "in one piece": {},
    "a chunk a sample": {"chunks": (1, *SHAPE)},
    "in chunks": {"chunks": (16, *SHAPE)},
    "compressed": {"chunks": (16, *SHAPE), "compression": "gzip"},
}


def write(path, fields=FIELDS, labels=LABELS, **storage):
    with h5py.File(path, "w") as file:
        file.create_dataset("fields", data=fields, **storage)
        file["labels"] = labels
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "fields.h5")


@pytest.fixture(params=STORED.values(), ids=STORED)
def arrays(request, tmp_path):
    return Arrays(write(tmp_path / "fields.h5", **request.param), ["fields", "labels"])


@pytest.mark.parametrize("index", [[7], [5, 3, 95, 17, 16, 3], range(10, 60), np.arange(0, 96, 9), []], ids=str)
def test_samples_in_any_order(arrays, index):
    fields, labels = arrays[index]
    assert np.array_equal(fields, FIELDS[list(index)])
    assert np.array_equal(labels, LABELS[list(index)])
    assert (fields.dtype, labels.dtype) == (torch.float32, torch.int64)


@pytest.mark.filterwarnings("error")
def test_one_sample(arrays):
    fields, label = arrays[5]
    assert np.array_equal(fields, FIELDS[5])
    assert label.item() == 5
    assert len(arrays) == SAMPLES
    assert arrays.shapes == (SHAPE, ())


def test_it_is_a_data_set_of_pytorch(path):
    """By samples, by a subset, and by batches."""
    arrays = Arrays(path, ["fields", "labels"], dtype=torch.float64)
    by_samples = next(iter(DataLoader(arrays, batch_sampler=[[4, 2]])))
    of_subset = next(iter(DataLoader(Subset(arrays, range(2, 96)), batch_sampler=[[2, 0]])))
    by_batches = next(iter(DataLoader(arrays, batch_size=None, sampler=[[4, 2]])))
    joined = ConcatDataset([Arrays(path, ["fields", "labels"], select=slice(0, 3)), arrays])
    of_two = next(iter(DataLoader(joined, batch_sampler=[[7, 2]])))
    for fields, labels in (by_samples, of_subset, by_batches, of_two):
        assert labels.tolist() == [4, 2]
        assert np.array_equal(fields, FIELDS[[4, 2]])
        assert fields.dtype == torch.float64


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_a_sample_that_are_not_those_of_the_whole(arrays, ranks):
    """Each rank reads its rows, of which the last of 3 ranks has as many as the second and more than the first."""
    wanted = [17, 3, 95, 3]
    full, labels = arrays[wanted]
    for rank in range(ranks):
        rows = own_slice(SHAPE[0], ranks, rank)
        own = Arrays(arrays.path, ["fields", "labels"], parts={"fields": (rows,)})
        fields, own_labels = own[wanted]
        assert torch.equal(fields, own_rows(full, ranks, rank, dim=1))
        assert torch.equal(labels, own_labels)
        assert own.shapes == (fields.shape[1:], ())
        # Ranks compare it before they train.
        assert own.digest() == arrays.digest()


@pytest.fixture
def by_day(tmp_path):
    """A netCDF file: packed in 16 bits, with missing values, by day."""
    days = xarray.date_range("2000-01-01", periods=60)
    data = FIELDS[:60].copy()
    data[40, 3, 2] = np.nan
    path = tmp_path / "days.nc"
    dataset = xarray.Dataset({"t": (("time", "lat", "lon"), data)}, {"time": days})
    packing = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 1.0, "_FillValue": -32768}
    dataset.to_netcdf(path, engine="h5netcdf", encoding={"t": packing}, unlimited_dims=["time"])
    return path


def test_packed_values_and_a_selection_by_time(by_day):
    february = Arrays(by_day, ["t"], select=slice("2000-02-01", "2000-02-05"))
    with xarray.open_dataset(by_day, engine="h5netcdf") as dataset:
        expected = dataset.t.sel(time=slice("2000-02-01", "2000-02-05")).to_numpy()
    assert len(february) == 5
    np.testing.assert_array_equal(february[[4, 0]][0], expected[[4, 0]])
    np.testing.assert_allclose(february[0][0], FIELDS[31], atol=0.001)


def test_missing_values_are_refused_by_name_or_replaced(by_day):
    days = Arrays(by_day, ["t"], select=slice("2000-02-01", None))
    assert days[[8]]
    with pytest.raises(DataError, match=r"days.nc: sample 9 of t has 1 of 256 values that are missing .* such as nan"):
        days[[8, 9]]
    replaced = Arrays(by_day, ["t"], missing=0.0)[[39, 40]][0]
    assert replaced.isfinite().all()
    assert replaced[1, 3, 2] == 0


def test_missing_values_count_only_in_the_part_that_is_read(by_day):
    """The packed value of day 40 is missing in row 3 and column 2."""
    full = Arrays(by_day, ["t"], missing=0.0)[[40, 2]][0]
    with pytest.raises(DataError, match="has 1 of 48 values that are missing"):
        Arrays(by_day, ["t"], parts={"t": (slice(2, 5), slice(0, 32, 2))})[[40, 2]]
    (south,) = Arrays(by_day, ["t"], parts={"t": (slice(4, 8),)})[[40, 2]]
    assert torch.equal(south, full[:, 4:])


def test_inf_is_never_replaced(tmp_path):
    fields = FIELDS.copy()
    fields[7, 0, 0] = np.inf
    path = write(tmp_path / "inf.h5", fields)
    with pytest.raises(DataError, match=r"sample 7 of fields has 1 of 256 values .* not finite, such as inf"):
        Arrays(path, ["fields"], missing=0.0)[[6, 7]]


def test_a_sum_that_overflows_is_no_error(tmp_path):
    fields = np.full((2, 4), 3e38, np.float32)
    path = write(tmp_path / "large.h5", fields, LABELS[:2])
    assert (Arrays(path, ["fields"])[[0, 1]][0] == 3e38).all()
    with pytest.raises(DataError, match=r"such as inf .*choose a wider dtype"):
        Arrays(path, ["fields"], dtype=torch.float16)[[0, 1]]


def test_byte_orders_and_kinds_of_integers(tmp_path):
    path = tmp_path / "kinds.h5"
    kinds = [">f8", ">i2", "u1", "u4", "?", "c8"]
    with h5py.File(path, "w") as file:
        for kind in kinds:
            file[kind] = np.arange(4).astype(kind)
    values = Arrays(path, kinds)[[3, 1]]
    for tensor in values[:4]:
        assert tensor.tolist() == [3, 1]
    dtypes = [torch.float64, torch.int64, torch.int64, torch.int64, torch.bool, torch.complex64]
    assert [tensor.dtype for tensor in values] == dtypes


def test_groups(tmp_path):
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        file["train/run_1/x"] = np.arange(4.0)
    assert Arrays(path, ["x"], group="train/run_1")[3][0] == 3
    with pytest.raises(DataError, match="no variable 'x' in the group /"):
        Arrays(path, ["x"])
    with pytest.raises(DataError, match="the group val cannot be opened"):
        Arrays(path, ["x"], group="val")


# The order.


@pytest.mark.parametrize("block", [1, 5, 16, 1000])
def test_blocks_stay_together_and_each_sample_comes_once(block):
    # Seed 3, epoch 0.
    order = epoch_order(3, 0, SAMPLES, block)
    assert sorted(order) == list(range(SAMPLES))
    blocks = order // block
    n_blocks = len(set(blocks))
    # The block changes only from one to the next.
    if block > 1:
        assert np.count_nonzero(np.diff(blocks)) == n_blocks - 1
    # It is shuffled.
    assert sorted(order) != order.tolist()
    other = epoch_order(3, 1, SAMPLES, block)
    assert other.tolist() != order.tolist()
    if block == 16:
        assert (order // 16)[::16].tolist() != sorted(set(blocks))
        # Inside of a block too.
        assert order[:16].tolist() != sorted(order[:16])


@pytest.mark.parametrize("block", [1, 16])
def test_ranks_share_out_the_same_global_batches(path, block):
    arrays = Arrays(path, ["labels"])

    def labels(dp, coordinate, first=0):
        size = 24 // dp
        loader = ArrayBatches(arrays, 24, coordinate * size, size, seed=5, block=block).from_step(first)
        return torch.stack([batch for (batch,) in islice(loader, 6 - first)])

    one = labels(1, 0)
    for dp in (2, 4):
        ranks = [labels(dp, coordinate) for coordinate in range(dp)]
        assert torch.equal(torch.cat(ranks, dim=1), one)
    # An epoch has four steps, and each sample once.
    assert sorted(one[:4].flatten()) == list(range(SAMPLES))
    assert torch.equal(labels(1, 0, first=3), one[3:])


def test_a_later_step_reads_nothing_of_those_before(path):
    arrays = Arrays(path, ["labels"])
    batches = ArrayBatches(arrays, 8, 0, 8, seed=0)
    assert batches.steps_per_epoch == 12
    requested = []
    arrays._read = lambda name, positions, chosen: requested.append(len(positions)) or torch.zeros(8)
    next(iter(batches.from_step(40)))
    assert requested == [8]


# What is read of the file.


def bytes_read(read, counter="rchar"):
    """Bytes that this process reads from files meanwhile; or the number of reads, for the counter ``syscr``."""

    def count():
        lines = Path("/proc/self/io").read_text().splitlines()
        counters = dict(line.split(": ") for line in lines)
        return int(counters[counter])

    before = count()
    read()
    return count() - before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a process reads")
def test_neighbours_are_read_as_one(tmp_path):
    """Samples are larger than the buffer by which HDF5 itself joins small reads."""
    path = write(tmp_path / "large.h5", np.zeros((32, 128, 256), np.float32), LABELS[:32])
    arrays = Arrays(path, ["fields"])
    arrays[[0]]
    # Those of the counter itself are among them.
    assert bytes_read(lambda: arrays[range(32)], "syscr") < 10
    assert bytes_read(lambda: arrays[range(0, 32, 2)], "syscr") >= 16


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes that a process reads")
def test_each_rank_reads_its_own_samples(tmp_path):
    """A quarter of the samples takes a quarter of the bytes, besides what the file says of itself."""
    fields = np.repeat(FIELDS, 32, axis=2)
    arrays = Arrays(write(tmp_path / "fields.h5", fields, chunks=(16, 8, 1024)), ["fields"])
    arrays[[0]]

    def epoch(first, size):
        for _ in islice(ArrayBatches(arrays, 32, first, size, seed=0).from_step(0), 3):
            pass

    full = bytes_read(lambda: epoch(0, 32))
    quarter = bytes_read(lambda: epoch(8, 8))
    # Each byte once, and little more.
    assert fields.nbytes <= full < 1.1 * fields.nbytes
    assert fields.nbytes / 4 <= quarter < 1.1 * fields.nbytes / 4


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes that a process reads")
def test_each_rank_reads_its_own_rows(tmp_path):
    """A quarter of the rows takes a quarter of the bytes. It is larger than the buffer of HDF5's small reads."""
    fields = np.zeros((16, 8, 16384), np.float32)
    path = write(tmp_path / "large.h5", fields, LABELS[:16])
    arrays = Arrays(path, ["fields"], parts={"fields": (slice(2, 4),)})
    arrays[[0]]
    quarter = bytes_read(lambda: arrays[range(16)])
    assert fields.nbytes / 4 <= quarter < 1.1 * fields.nbytes / 4


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes that a process reads")
def test_blocks_read_each_compressed_chunk_once(tmp_path, monkeypatch):
    """Freely shuffled, a step of 16 samples reads almost all 6 chunks; in blocks of a chunk it reads one."""
    # A chunk is larger than HDF5's cache, which would hide what is read again.
    monkeypatch.setattr("mmm.data.arrays.CHUNK_CACHE", 0)
    fields = np.random.default_rng(1).standard_normal((SAMPLES, 64, 64))
    path = write(tmp_path / "fields.h5", fields, chunks=(16, 64, 64), compression="gzip")
    arrays = Arrays(path, ["fields"])
    assert arrays.chunk == 16

    def epoch(batch, block):
        for _ in islice(ArrayBatches(arrays, batch, 0, batch, seed=0, block=block).from_step(0), SAMPLES // batch):
            pass

    size = path.stat().st_size
    # The second batch of 8 finds the chunk in HDF5's cache.
    for batch in (16, 8):
        in_blocks = bytes_read(lambda batch=batch: epoch(batch, 16))
        assert 0.8 * size < in_blocks < 1.1 * size
    freely = bytes_read(lambda: epoch(16, 1))
    assert freely > 4 * size


def test_only_what_is_compressed_counts_as_a_chunk(tmp_path, caplog):
    chunks = {
        name: Arrays(write(tmp_path / f"{name}.h5", **options), ["fields"]).chunk for name, options in STORED.items()
    }
    assert chunks == {"in one piece": 1, "a chunk a sample": 1, "in chunks": 1, "compressed": 16}


# Processes and threads.


def read_all(batches, steps):
    return [fields for (fields,) in islice(workers.read(batches.from_step(0), timeout=60), steps)]


@pytest.mark.skipif(Version(h5py.__version__) < Version("3.14"), reason="a process that is forked meanwhile hangs")
def test_forked_workers_while_threads_of_the_parent_read(path):
    arrays = Arrays(path, ["fields"])
    expected = read_all(ArrayBatches(arrays, 8, 0, 8, seed=0), 12)
    stop = threading.Event()
    wrong = []

    def keep_reading():
        while not stop.is_set():
            (fields,) = arrays[range(SAMPLES)]
            if not np.array_equal(fields, FIELDS):
                wrong.append(fields)

    threads = [threading.Thread(target=keep_reading) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            forked = read_all(ArrayBatches(arrays, 8, 0, 8, seed=0, workers=2), 12)
            assert all(map(torch.equal, forked, expected))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_forked_process_opens_the_file_for_itself(path):
    arrays = Arrays(path, ["fields"])
    assert arrays._opened is None
    arrays[[0]]
    own = arrays._opened[1]["fields"]
    child = os.fork()
    if child == 0:
        same_values = np.array_equal(arrays[[3]][0], FIELDS[[3]])
        right = same_values and arrays._opened[1]["fields"] is not own
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_copy_for_a_spawned_worker(path):
    arrays = Arrays(path, ["fields"])
    arrays[[0]]
    copy = pickle.loads(pickle.dumps(arrays))
    assert np.array_equal(copy[[3]][0], FIELDS[[3]])


@pytest.mark.parametrize("n_workers", [0, 1])
def test_an_error_is_one_line_also_from_a_worker(tmp_path, n_workers):
    fields = FIELDS.copy()
    fields[:] = np.nan
    batches = ArrayBatches(Arrays(write(tmp_path / "nan.h5", fields), ["fields"]), 8, 0, 8, seed=0, workers=n_workers)
    # No variable holds the error, whose traceback would keep the worker until some later test.
    with pytest.raises(DataError, match=r"^.*nan\.h5: sample \d+ of fields has 256 of 256 values.*\Z"):
        next(workers.read(batches.from_step(0), timeout=60))


# What is refused.


def test_a_file_that_changes(path):
    arrays = Arrays(path, ["fields"])
    arrays[[0]]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(DataError, match=r"fields.h5 has changed since it was opened"):
        arrays[[0]]
    path.unlink()
    with pytest.raises(DataError, match=r"fields.h5: No such file"):
        arrays[[0]]


def empty(path):
    path.write_bytes(b"")


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def classic(path):
    path.write_bytes(b"CDF\x01" + bytes(100))


def table(path):
    path.write_text("1,2\n3,4\n")


def folder(path):
    path.unlink()
    path.mkdir()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def missing_file(path):
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty, "none of HDF5, netCDF-4 and Zarr"),
        (truncated, "cannot be opened .*truncated"),
        (classic, "is netCDF-3: convert it by nccopy"),
        (table, "none of HDF5, netCDF-4 and Zarr"),
        (folder, "is a folder without zarr.json or .zgroup"),
        (pipe, "not a regular file"),
        (missing_file, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read(path, spoil, message):
    spoil(path)
    with pytest.raises(DataError, match=rf"fields\.h5.* {message}") as error:
        Arrays(path, ["fields"])
    assert "\n" not in str(error.value)


def test_a_chunk_that_is_damaged(tmp_path):
    path = write(tmp_path / "fields.h5", chunks=(16, *SHAPE), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["fields"].id.get_chunk_info(2)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(bytes(chunk.size))
    arrays = Arrays(path, ["fields"])
    assert len(arrays[range(32)][0]) == 32
    with pytest.raises(DataError, match=r"fields.h5: fields cannot be read \(.*\): is the file damaged\?"):
        arrays[[40]]


def test_variables_that_do_not_fit(tmp_path):
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((4, 2))
        file["longer"] = np.zeros(5)
        file["none"] = np.zeros((0, 2))
        file["scalar"] = 1.0
        file["text"] = np.array([b"a", b"b", b"c", b"d"])
        file["compound"] = np.zeros(4, dtype=[("a", "f4"), ("b", "i4")])
    for variables, message in [
        (["y"], "no variable 'y' in the group /; its variables: .*longer.* x$"),
        (["x", "longer"], "first dimensions .* x has 4 .*, longer has 5"),
        (["none"], "no samples for select=None: the variables have 0"),
        (["scalar"], r"scalar is float64 of shape \(\)"),
        (["text"], r"text is \|S1 of shape \(4,\).* and samples are numbers"),
        (["compound"], "compound is .* and samples are numbers"),
        ([], "give the names"),
    ]:
        with pytest.raises(DataError, match=message):
            Arrays(path, variables)


def test_selections_that_do_not_fit(by_day, path):
    with pytest.raises(
        DataError, match=r"no samples for select=slice\('2001'.* time is from 2000-01-01.* to .* in 60 samples"
    ):
        Arrays(by_day, ["t"], select=slice("2001", "2002"))
    with pytest.raises(DataError, match=r"cannot be selected: .*; time is from"):
        Arrays(by_day, ["t"], select=slice("spring", "summer"))
    with pytest.raises(DataError, match=r"no samples for select=slice\(96, 100, None\): .* have 96; "):
        Arrays(path, ["fields"], select=slice(96, 100))
    assert len(Arrays(path, ["fields"], select=slice(90, None))) == 6


@pytest.mark.parametrize(
    ("variable", "slices"),
    [
        ("fields", (slice(4, 9),)),
        ("fields", (slice(8, None),)),
        ("fields", (slice(None, None, -1),)),
        ("labels", (slice(0, 1),)),
        ("other", ()),
    ],
    ids=str,
)
def test_parts_that_do_not_lie_in_a_sample(path, variable, slices):
    with pytest.raises(DataError, match=variable):
        Arrays(path, ["fields", "labels"], parts={variable: slices})


def test_a_variable_that_is_not_written_to_its_end(tmp_path):
    path = tmp_path / "open.nc"
    with xarray.Dataset({"x": ("time", np.zeros(8)), "y": ("time", np.zeros(8))}) as dataset:
        dataset.to_netcdf(path, engine="h5netcdf", unlimited_dims=["time"])
    with h5py.File(path, "r+") as file:
        file["y"].resize((5,))
    assert len(Arrays(path, ["x"])) == 8
    with pytest.raises(DataError, match="y is written for 5 of 8 samples"):
        Arrays(path, ["x", "y"])


def test_zarr_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "zarr.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(DataError, match=r"pip install 'mmm\[zarr\]'"):
        Arrays(tmp_path, ["x"])


def test_batches_that_do_not_fit(path):
    arrays = Arrays(path, ["fields"])
    with pytest.raises(DataError, match="97 samples, and there are 96"):
        ArrayBatches(arrays, 97, 0, 97, seed=0)
    with pytest.raises(UserError, match="a block of 0 samples"):
        local_batches(10, 2, 0, 2, seed=0, block=0)
