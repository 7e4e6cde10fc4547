"""What is left when a run does not end as it should: killed, out of disk, unreadable. What is kept is what was given:
every float bit, every rank, late names; and the line that is printed."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc

import h5py
import numpy as np
import pytest
import xarray

from mmm.errors import RecordError
from mmm.history import History, finalize, load
from support.processes import leave_as_killed

RANKS = [{"rank": r, "host": "a"} for r in range(2)]
WRITER = """
import sys, time
from mmm.history import History
history = History(sys.argv[1], ranks=[{"rank": 0, "host": "a"}, {"rank": 1, "host": "a"}], flush_every=int(sys.argv[3]))
for step in range(int(sys.argv[2])):
    history.update({"iter": step, "loss": 1.0 / (step + 1)}, {"dt": [0.1, 0.2]})
    time.sleep(float(sys.argv[4]))
print("ready", flush=True)
time.sleep(60)
"""


def writer(folder, rows, flush_every=10, pause=0.0):
    arguments = [sys.executable, "-c", WRITER, str(folder), str(rows), str(flush_every), str(pause)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def journal_of(folder, rows=5):
    """A journal as a kill leaves it."""
    history = History(folder, ranks=RANKS, flush_every=1)
    for step in range(rows):
        history.update({"iter": step, "loss": step / 3}, {"dt": [0.1, step / 7]})
    leave_as_killed(history)
    return folder / "journal.jsonl"


def test_a_killed_process_keeps_all_but_its_last_rows(tmp_path):
    process = writer(tmp_path, 37)
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(RecordError, match="still writing"):
            finalize(tmp_path)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    ds = load(tmp_path)
    assert ds.sizes["draw"] >= 30
    assert ds["loss"].values.tolist() == [1.0 / (step + 1) for step in range(ds.sizes["draw"])]
    # Reading left the folder as it was.
    assert not (tmp_path / "train_dataset.h5").exists()
    assert finalize(tmp_path) == tmp_path / "train_dataset.h5"
    assert not (tmp_path / "journal.jsonl").exists()
    assert load(tmp_path).identical(ds)
    with h5py.File(tmp_path / "train_dataset.h5") as file:
        assert file["dt"].shape == (ds.sizes["draw"], 2)


def test_a_line_cut_short_is_left_out(tmp_path):
    path = journal_of(tmp_path)
    complete = path.read_bytes()
    for cut in (1, 2, 20, 60):
        path.write_bytes(complete[:-cut])
        rows = load(tmp_path).sizes["draw"]
        # Without the newline only, the line is still whole.
        assert rows == (5 if cut == 1 else 4)
    last = complete.splitlines(keepends=True)[-1]
    for cut in range(2, len(last)):
        path.write_bytes(complete[:-cut])
        assert load(tmp_path).sizes["draw"] == 4


def test_a_line_without_an_end_is_not_taken_into_memory(tmp_path):
    path = journal_of(tmp_path)
    with open(path, "ab") as file:
        file.truncate(path.stat().st_size + 300_000_000)
    tracemalloc.start()
    ds = load(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ds.sizes["draw"] == 5
    assert "line 7 is not a row" in ds.attrs["left_out"]
    assert peak < 100_000_000
    finalize(tmp_path)
    assert (tmp_path / "journal-damaged.jsonl").exists()


# A line of the journal whose floats need all of their digits.
ROW = {"draw": 2, "row": {"iter": 2, "loss": 2 / 3}, "per_rank": {"dt": [0.1, 2 / 7]}}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1, 2]", ""),
        (json.dumps({**ROW, "draw": True}), "True"),
        (json.dumps({**ROW, "draw": 3}), "its draw 3 does not follow 1"),
        (json.dumps({**ROW, "draw": 1}), "its draw 1 does not follow 1"),
        (json.dumps({**ROW, "row": [1.0]}), ""),
        (json.dumps({**ROW, "row": {"iter": None}}), "None, which is not a number"),
        (json.dumps({**ROW, "row": {"loss": 10**400}}), "too large"),
        (json.dumps({**ROW, "row": {"a/b": 1}}), "'a/b' cannot name a variable"),
        (json.dumps({**ROW, "row": {"host": 1}}), "'host' is a coordinate"),
        (json.dumps({**ROW, "per_rank": {"dt": [0.1, 0.2, 0.3]}}), "3 values, and there are 2 ranks"),
        (json.dumps(ROW).replace("loss", "lo\udc80ss"), "can't decode"),
    ],
    ids=range(11),
)
def test_a_journal_is_read_up_to_a_line_that_is_no_row(tmp_path, caplog, line, why):
    path = journal_of(tmp_path)
    lines = path.read_text().splitlines()
    text = "\n".join([*lines[:3], line, *lines[4:], ""])
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = path.read_bytes()
    ds = load(tmp_path)
    assert ds["loss"].values.tolist() == [0.0, 1 / 3]
    assert "line 4 is not a row (" in caplog.text
    assert why in caplog.text
    finalize(tmp_path)
    assert (tmp_path / "journal-damaged.jsonl").read_bytes() == before
    assert load(tmp_path)["draw"].values.tolist() == [0, 1]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'{"mmm_journal": 1}',
        b"\x00\x00",
        b'{"mmm_journal": 9, "ranks": [], "attrs": {}}',
        b'{"mmm_journal": 1, "ranks": ["n0", {}], "attrs": {}}',
        b'{"mmm_journal": 1, "ranks": [{}, {}], "attrs": "%s"}',
    ],
)
def test_a_broken_header_is_an_error(tmp_path, header):
    path = journal_of(tmp_path)
    path.write_bytes(b"\n".join([header, *path.read_bytes().splitlines()[1:]]))
    with pytest.raises(RecordError, match=r"journal.jsonl.*(header|version 9)"):
        load(tmp_path)


def test_texts_that_hdf5_cannot_hold_are_escaped(tmp_path):
    path = journal_of(tmp_path)
    header, *rows = path.read_bytes().splitlines()
    fields = json.loads(header)
    fields["attrs"]["mmm_version"] = "1\0"
    for rank in fields["ranks"]:
        rank["host"] = "n\0\ud800"
    path.write_bytes(b"\n".join([json.dumps(fields).encode(), *rows, b""]))
    finalize(tmp_path)
    dataset = load(tmp_path)
    assert dataset.attrs["mmm_version"] == r"1\x00"
    assert set(dataset["host"].values.tolist()) == {r"n\x00\ud800"}


def test_a_kill_between_the_dataset_and_the_journal(tmp_path):
    """The dataset is in place and the journal not yet removed: every row counts once."""
    path = journal_of(tmp_path)
    saved = path.read_bytes()
    finalize(tmp_path)
    path.write_bytes(saved)
    assert load(tmp_path)["draw"].values.tolist() == [0, 1, 2, 3, 4]
    finalize(tmp_path)
    assert load(tmp_path)["loss"].values.tolist() == [step / 3 for step in range(5)]
    assert [p.name for p in tmp_path.iterdir()] == ["train_dataset.h5"]


def test_what_is_no_record(tmp_path):
    for read in (load, finalize):
        with pytest.raises(RecordError, match="does not exist"):
            read(tmp_path / "no")
        with pytest.raises(RecordError, match=r"holds no run's record.*nothing"):
            read(tmp_path)
    (tmp_path / "a file").write_text("x")
    with pytest.raises(RecordError, match="but a file"):
        load(tmp_path)
    with pytest.raises(RecordError, match="is a file, and a run's record is a folder"):
        load(tmp_path / "a file")


def test_a_damaged_dataset(tmp_path):
    path = tmp_path / "train_dataset.h5"
    with History(tmp_path, ranks=RANKS) as history:
        history.update({"loss": 1.0})
    complete = path.read_bytes()
    for content in (b"", b"not HDF5 at all", complete[: len(complete) // 2], b"\x89HDF\r\n\x1a\n" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=r"train_dataset.h5"):
            load(tmp_path)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(RecordError, match="is not a run's dataset"):
        load(tmp_path)
    path.write_bytes(complete)
    with h5py.File(path, "r+") as file:
        file["odd"] = file["rank"][:]
        file["odd"].dims[0].attach_scale(file["rank"])
    with pytest.raises(RecordError, match="damaged: odd has the dimensions"):
        load(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match=r"cannot read .*train_dataset.h5: it is not a regular file"):
        load(tmp_path)


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_what_is_there(tmp_path, monkeypatch):
    history = History(tmp_path, ranks=RANKS, flush_every=2)
    for step in range(4):
        history.update({"iter": step})
    with monkeypatch.context() as patch:
        real, calls = os.write, []

        def half(fd, content):
            # Some bytes still fit.
            calls.append(fd)
            if len(calls) == 1:
                return real(fd, content[:9])
            return full()

        patch.setattr(os, "write", half)
        history.update({"iter": 4})
        with pytest.raises(RecordError, match=r"cannot write .*journal.jsonl: No space left.*[\d,]+ bytes are free"):
            history.update({"iter": 5})
        assert load(tmp_path)["iter"].values.tolist() == [0, 1, 2, 3]
    # Room again: nothing was lost, nothing is torn.
    history.update({"iter": 6})
    history.close()
    assert load(tmp_path)["iter"].values.tolist() == list(range(7))


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
        # What is flushed of a run that goes on.
        live = load(tmp_path)
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
    slowest = [int(np.argmax(times[0])), 40, int(np.nanargmax(times[2])), -1]
    assert ds["dt_argmax"].values.tolist() == slowest
    assert ds["dt_argmax"].dtype == np.int64
    assert np.isnan(ds["dt_max"].values[3])
    # So that the slow rank can be found.
    assert ds["host"].values[40] == "x10"


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
