"""Pairs and sequences of time steps: their number, their order and their values are those of plain NumPy slices."""

import numpy as np
import pytest
import torch
import xarray

from mmm.data.arrays import ArrayBatches, Arrays
from mmm.data.local_batches import local_batches
from mmm.data.sequences import Sequences
from mmm.errors import DataError

HOURS = 60
# (hours, lat, lon)
FIELDS = np.random.default_rng(0).standard_normal((HOURS, 3, 4)).astype(np.float32)
WIND = np.arange(HOURS)
# One every six hours.
TIMES = xarray.date_range("2000-01-01", periods=HOURS, freq="6h").to_numpy()


def write(path, hours=slice(None), times=TIMES, fields=FIELDS, time="time"):
    """A netCDF file with the fields of some hours."""
    coordinates = {} if times is None else {time: times[hours]}
    data = {"t": ((time, "lat", "lon"), fields[hours]), "wind": ((time,), WIND[: len(fields)][hours])}
    xarray.Dataset(data, coordinates).to_netcdf(path, engine="h5netcdf")
    return path


def of(*paths, names=("t", "wind"), **options):
    return Sequences([Arrays(path, names) for path in paths], **options)


def expected(lead, steps, left=range(HOURS), gaps=()):
    """First hours of the samples. A gap is after an hour of the file."""
    hours = list(left)
    starts = []
    for i in range(len(hours) - lead * (steps - 1)):
        if not any(i <= gap < i + lead * (steps - 1) for gap in gaps):
            starts.append(hours[i])
    return starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The hours in one file, and in three: 20, 1 and 39 of them."""
    path = tmp_path_factory.mktemp("files")
    write(path / "all.nc")
    for i, hours in enumerate((slice(20), slice(20, 21), slice(21, None))):
        write(path / f"part{i}.nc", hours)
        write(path / f"plain{i}.nc", hours, times=None)
    return path


# The same hours, in one file or in three.
FILES = {
    "one": ["all.nc"],
    "three": ["part0.nc", "part1.nc", "part2.nc"],
    "no times": [f"plain{i}.nc" for i in range(3)],
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
@pytest.mark.parametrize(("lead", "steps"), [(1, 2), (6, 2), (1, 4), (3, 5), (59, 2), (7, 1)])
def test_values_are_those_of_plain_slices(folder, files, lead, steps):
    """A sample may begin in one file and end in the next, and step over a file of one hour."""
    sequences = of(*(folder / name for name in files), lead=lead, steps=steps)
    n = HOURS - lead * (steps - 1)
    assert len(sequences) == n
    order = np.random.default_rng(1).permutation(n)
    fields, wind = sequences[order]
    for k in range(steps):
        assert np.array_equal(fields[:, k], FIELDS[k * lead :][:n][order])
        assert np.array_equal(wind[:, k], WIND[k * lead :][:n][order])
    assert fields.dtype == torch.float32
    one, _ = sequences[n - 1]
    assert np.array_equal(one, FIELDS[n - 1 :: lead][:steps])
    assert sequences.shapes == ((steps, 3, 4), (steps,))
    assert [len(values) for values in sequences[[]]] == [0, 0]


@pytest.mark.parametrize(("lead", "steps"), [(1, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize("between", [False, True], ids=["inside a file", "between files"])
def test_no_sample_spans_a_gap(tmp_path, monkeypatch, lead, steps, between):
    """Three hours are missing, 30 to 32. A difference of positions would take 29 and 33 for neighbours."""
    notes = []
    monkeypatch.setattr("mmm.data.sequences.say_once", notes.append)
    left = [*range(30), *range(33, HOURS)]
    paths = [tmp_path / "a.nc", tmp_path / "b.nc"]
    if between:
        write(paths[0], slice(30))
        write(paths[1], slice(33, None))
    else:
        paths = [write(paths[0], left)]
    sequences = of(*paths, lead=lead, steps=steps)
    starts = expected(lead, steps, left, gaps=[29])
    _, hours = sequences[range(len(sequences))]
    assert hours.tolist() == [[s + k * lead for k in range(steps)] for s in starts]
    # Samples are lost at the end, and as many before the gap.
    assert len(starts) == HOURS - 3 - 2 * lead * (steps - 1)
    # It is said how many.
    assert f"{lead * (steps - 1)} sample" in notes[0]


@pytest.mark.parametrize("calendar", ["standard", "months", "years", "numbers"])
def test_what_is_no_gap(tmp_path, calendar):
    """Months and years have different lengths; a coordinate may be plain numbers."""
    frequency = {"months": "MS", "years": "YS"}.get(calendar, "D")
    times = xarray.date_range("2000-01-01", periods=HOURS, freq=frequency).to_numpy()
    if calendar == "numbers":
        times = np.arange(HOURS) * 0.1
    assert len(of(write(tmp_path / "a.nc", times=times), lead=2)) == HOURS - 2


def test_a_calendar_without_leap_days(tmp_path):
    pytest.importorskip("cftime")
    times = xarray.date_range("2000-02-01", periods=HOURS, freq="D", calendar="noleap", use_cftime=True)
    saved = [*range(40), *range(42, HOURS)]
    assert len(of(write(tmp_path / "a.nc", times=times.to_numpy()))) == HOURS - 1
    assert len(of(write(tmp_path / "b.nc", saved, times.to_numpy()))) == HOURS - 4


def test_a_sample_lies_within_the_selection(folder):
    """Those to train on and those to test on share no hour."""
    train, test = (
        Sequences(Arrays(folder / "all.nc", ["wind"], select=select), lead=2, steps=3)
        for select in (slice("2000-01-01", "2000-01-05"), slice("2000-01-06", None))
    )
    assert len(train) == 20 - 4
    assert len(test) == 40 - 4
    assert train[range(len(train))][0].max() == 19
    assert test[range(len(test))][0].min() == 20


def test_what_cannot_be_samples_of_a_forecast(folder, tmp_path):
    late = folder / "part2.nc"
    early = folder / "part0.nc"
    with pytest.raises(DataError, match=r"part0.nc: 2000-01-01\S* comes after 2000-01-15"):
        of(late, early)
    with pytest.raises(DataError, match=r"part0.nc: 2000-01-01\S* comes after"):
        of(early, early)
    with pytest.raises(DataError, match=r"plain1.nc has no times"):
        of(early, folder / "plain1.nc")
    with pytest.raises(DataError, match="61 time steps in a row, and there are 60"):
        of(folder / "all.nc", lead=30, steps=3)
    assert len(of(late, early, steps=1)) == HOURS - 1
    with pytest.raises(DataError, match="of no file"):
        of()
    for options in ({"lead": 0}, {"lead": -1}, {"steps": 0}):
        with pytest.raises(DataError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
            of(folder / "all.nc", **options)
    other = write(tmp_path / "other.nc", fields=FIELDS[:, :2])
    with pytest.raises(DataError, match=r"other\.nc"):
        of(folder / "all.nc", other)


def test_files_of_which_other_rows_are_read(folder):
    """Rows of one file would follow other rows of the next."""
    north = {"t": (slice(0, 2),)}
    files = [Arrays(folder / f"part{i}.nc", ["t"], parts=north) for i in range(3)]
    (fields,) = Sequences(files)[range(HOURS - 1)]
    assert np.array_equal(fields[:, 1], FIELDS[1:, :2])
    south = Arrays(folder / "part2.nc", ["t"], parts={"t": (slice(1, 3),)})
    with pytest.raises(DataError, match=r"part2\.nc"):
        Sequences([*files[:2], south])


def seen_on(rank, paths, layout_dp):
    """The hours that a rank reads in five steps."""
    sequences = of(*paths, names=["wind"], lead=2)
    size = 8 // layout_dp
    batches = ArrayBatches(sequences, 8, rank.rank % layout_dp * size, size, seed=3)
    loader = iter(batches.from_step(5))
    return [next(loader)[0].tolist() for _ in range(5)]


def test_global_batches_are_the_same_on_every_mesh(run_on_ranks, folder):
    """By seed and step: the order is that of `local_batches`, whose order NumPy promises."""
    paths = [folder / name for name in FILES["three"]]
    order = local_batches(HOURS - 2, 8, 0, 8, 3, first_step=5)
    plain = [[[int(i), int(i) + 2] for i in next(order)] for _ in range(5)]
    for ranks in (1, 2, 4):
        by_rank = run_on_ranks(seen_on, ranks, paths, ranks)
        together = [[pair for own in step for pair in own] for step in zip(*by_rank, strict=True)]
        assert together == plain


def test_ranks_with_other_samples_are_told_apart(folder):
    """`run.steps` compares the hash of every rank."""
    paths = [folder / name for name in FILES["three"]]
    others = [of(*paths), of(*paths, lead=2), of(*paths, steps=3)]
    others += [of(*paths[:2]), of(*paths, names=["wind"])]
    assert len({sequences.digest() for sequences in [*others, of(*paths)]}) == len(others)
