"""A running run's record where the file system has no locks, and a journal that goes away under its writer."""

import errno
import os
import re
import subprocess
import sys
import time

import pytest

import mmm.history
from mmm.errors import RecordError
from mmm.history import History, finalize, load
from mmm.history.record import dataset, reader
from mmm.history.record.journal import this_process
from mmm.outside import Lock
from support.clock import PATIENCE
from support.processes import leave_as_killed

# A process on a file system that has no locks.
NO_LOCKS = f"""
import fcntl, sys
def without_locks(*args):
    raise OSError({errno.ENOLCK}, "No locks available")
fcntl.flock = without_locks
"""
WRITER = (
    NO_LOCKS
    + """
from mmm.history import History
with History(sys.argv[1], ranks=[{}], flush_every=1) as history:
    for line in sys.stdin:
        for step in range(int(line)):
            history.update({"loss": 1.0 / (len(history) + 1)})
        print(len(history), flush=True)
"""
)
FOLD = (
    NO_LOCKS
    + """
from mmm_lab.cli.history import main
from mmm.errors import UserError
from mmm.history.record import reader
try:
    main([sys.argv[1], "--finalize"])
except UserError as error:
    sys.exit(str(error))
"""
)
HERE = this_process()["host"]


@pytest.fixture
def writer(tmp_path):
    """A process that keeps as many rows as it is told, on a file system without locks."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "run")], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def write(rows):
        process.stdin.write(f"{rows}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    write.process = process
    write.folder = tmp_path / "run"
    yield write
    process.kill()
    process.wait()
    process.stdout.close()


def fold_elsewhere(folder, host=HERE):
    """`mmm history --finalize` on a host of that name."""
    return subprocess.run([sys.executable, "-c", FOLD, str(folder), host], capture_output=True, text=True, check=False)


def age(folder, seconds):
    os.utime(folder / "journal.jsonl", (time.time() - seconds,) * 2)


@pytest.fixture
def no_locks(monkeypatch):
    def without(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without)


def losses(folder):
    return load(folder)["loss"].values.tolist()


def expected(rows):
    return [1.0 / (step + 1) for step in range(rows)]


def test_a_running_run_is_not_finalized(writer):
    assert writer(5) == 5
    # This process has locks, and nobody holds one.
    assert mmm.history.state(writer.folder) == "running"
    done = fold_elsewhere(writer.folder)
    assert done.returncode == 1
    assert f"{writer.process.pid}" in done.stderr
    age(writer.folder, 3)
    done = fold_elsewhere(writer.folder, "another")
    assert done.returncode == 1
    message = rf"written \d+ s ago by process {writer.process.pid} on {HERE}: only after 15 minutes"
    assert re.search(message, done.stderr)
    assert writer(5) == 10
    writer.process.stdin.close()
    assert writer.process.wait(PATIENCE) == 0
    assert losses(writer.folder) == expected(10)
    assert mmm.history.state(writer.folder) == "finished"


@pytest.mark.long
def test_a_run_that_was_finalized_under_its_feet_keeps_every_row(writer):
    """Another host finalizes a run that has paused for long: no process to ask, no lock."""
    assert writer(5) == 5
    age(writer.folder, reader.RECENT + 5)
    assert fold_elsewhere(writer.folder, "another").returncode == 0
    assert not (writer.folder / "journal.jsonl").exists()
    assert writer(3) == 8
    # Dataset and journal, each row once.
    assert losses(writer.folder) == expected(8)
    age(writer.folder, reader.RECENT + 5)
    assert fold_elsewhere(writer.folder, "another").returncode == 0
    writer.process.stdin.close()
    assert writer.process.wait(PATIENCE) == 0
    assert losses(writer.folder) == expected(8)
    assert mmm.history.state(writer.folder) == "finished"
    assert [path.name for path in writer.folder.iterdir()] == ["train_dataset.h5"]


def test_state_without_locks(tmp_path, no_locks):
    history = History(tmp_path, ranks=[{}], flush_every=1)
    history.update({"loss": 1.0})
    assert mmm.history.state(tmp_path) == load(tmp_path).attrs["state"] == "running"
    with pytest.raises(RecordError, match=r"still writing \(this file system has no locks"):
        finalize(tmp_path)
    age(tmp_path, reader.RECENT + 5)
    assert mmm.history.state(tmp_path) == "killed"


def test_a_journal_that_grows_while_it_is_finalized_stays(tmp_path, monkeypatch):
    History(tmp_path, ranks=[{}], flush_every=1).update({"loss": 1.0})
    real = dataset.write_dataset

    def grows(*args):
        with open(tmp_path / "journal.jsonl", "a") as file:
            file.write('{"draw": 1, "row": {"loss": 0.5}, "per_rank": {}}\n')
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(reader, "lock", lambda fd, shared=False: Lock.LOCKED)
        patch.setattr(dataset, "write_dataset", grows)
        with pytest.raises(RecordError, match=r"still writing \(its journal has grown beyond the \d+ bytes"):
            finalize(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.jsonl", "train_dataset.h5"]
    assert losses(tmp_path) == [1.0, 0.5]


@pytest.mark.parametrize("way", ["removed", "folder removed", "copied over"])
def test_the_writer_notices_that_its_journal_is_gone(tmp_path, caplog, way):
    folder = tmp_path / "run"
    history = History(folder, ranks=[{}], flush_every=1)
    history.update({"loss": 1.0})
    path = folder / "journal.jsonl"
    if way == "copied over":
        (folder / "copy").write_text(path.read_text())
        os.replace(folder / "copy", path)
    else:
        path.unlink()
    if way == "folder removed":
        folder.rmdir()
    history.update({"loss": 0.5})
    assert "it was written again, with 1 rows" in caplog.text
    assert losses(folder) == expected(2)
    # The new file is locked as well.
    assert mmm.history.state(folder) == "running"
    path.unlink()
    history.close()
    assert losses(folder) == expected(2)


LOOK = """
import os, sys
from mmm.outside import lock
descriptor = os.open(sys.argv[1], os.O_RDONLY)
print(lock(descriptor, shared=True), flush=True)
sys.stdin.read()
"""


def test_two_readers_at_once_see_that_a_run_is_dead(tmp_path):
    """One that looks whether the run goes on holds the lock for that moment; the other is no running run to it."""
    history = History(tmp_path, ranks=[{}], flush_every=1)
    history.update({"loss": 1.0})
    # As if the process had gone.
    leave_as_killed(history)
    command = [sys.executable, "-c", LOOK, str(tmp_path / "journal.jsonl")]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as looks:
        assert looks.stdout.readline() == "Lock.LOCKED\n"
        assert mmm.history.state(tmp_path) == load(tmp_path).attrs["state"] == "killed"
        with pytest.raises(RecordError, match="other processes hold its journal's lock"):
            finalize(tmp_path)
        looks.stdin.close()
    finalize(tmp_path)
    assert losses(tmp_path) == [1.0]


def test_a_slow_run_is_seen_while_it_runs(tmp_path, monkeypatch):
    """Rows reach the file by time as well: every 5 s, where `flush_every` of them take longer."""
    now = [100.0]
    monkeypatch.setattr("mmm.history.record.history.time.monotonic", lambda: now[0])
    history = History(tmp_path, ranks=[{}], flush_every=10)
    seen = []
    for seconds in (2.0, 2.0, 2.0, 2.0, 6.0):
        now[0] += seconds
        history.update({"loss": 1.0})
        seen.append(len((tmp_path / "journal.jsonl").read_text().splitlines()) - 1)
    assert seen == [0, 0, 3, 3, 5]
    monkeypatch.undo()
    history.close()
