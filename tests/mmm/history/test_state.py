"""What became of a run is in its record: running, finished, interrupted, failed or killed, and by what."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

import mmm.history
from mmm.history import History, finalize, load, write_config
from mmm_lab.cli.history import main as history_command
from support.clock import PATIENCE
from support.launcher import Launcher
from support.processes import leave_as_killed
from support.signals import as_from_a_terminal

WRITER = """
import signal, sys, time
from mmm.history import History, write_config
from mmm_launch.host import child
outdir, ends = sys.argv[1:]
if ends == "ranks":
    child.prepare()
write_config(outdir, {"module": "test", "state": "running"})
with History(outdir, ranks=[{}], flush_every=1) as history:
    history.update({"loss": 1.0})
    print("ready", flush=True)
    time.sleep(60)
"""


def record(folder, error=None):
    """A record of a run that `error` has ended."""
    write_config(folder, {"module": "test"})
    try:
        with History(folder, ranks=[{}]) as history:
            history.update({"loss": 1.0})
            assert mmm.history.state(folder) == "running"
            assert json.loads((folder / "config.json").read_text())["state"] == "running"
            if error is not None:
                raise error
    except BaseException as caught:
        assert caught is error  # noqa: PT017


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (None, "finished", None),
        (SystemExit(0), "finished", None),
        (SystemExit(), "finished", None),
        (KeyboardInterrupt(), "interrupted", "SIGINT"),
        (SystemExit(128 + signal.SIGTERM), "interrupted", "SIGTERM"),
        (SystemExit(128 + signal.SIGHUP), "interrupted", "SIGHUP"),
        (SystemExit(75), "interrupted", "a signal; the state is saved"),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (RuntimeError("first\n  second"), "failed", "RuntimeError: first second"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
        (ValueError("x" * 10_000), "failed", f"ValueError: {'x' * 487}…"),
    ],
)
def test_how_it_ended(tmp_path, capsys, error, state, message):
    record(tmp_path, error)
    assert mmm.history.state(tmp_path) == state
    dataset = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for attributes in (dataset.attrs, config, json.loads(dataset.attrs["config"])):
        assert (attributes["state"], attributes.get("error")) == (state, message)
    assert dataset.sizes["draw"] == 1
    history_command([str(tmp_path)])
    assert f"state      {state}{f': {message}' if message else ''}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "signum", "state", "message"),
    [
        pytest.param("ranks", signal.SIGTERM, "interrupted", "SIGTERM", marks=pytest.mark.long),
        ("ranks", signal.SIGINT, "interrupted", "SIGINT"),
        pytest.param("plain", signal.SIGTERM, "killed", None, marks=pytest.mark.long),
        ("plain", signal.SIGKILL, "killed", None),
    ],
)
def test_signals(tmp_path, ends, signum, state, message):
    command = [sys.executable, "-c", WRITER, str(tmp_path), ends]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal())
    try:
        assert process.stdout.readline() == "ready\n"
        assert mmm.history.state(tmp_path) == "running"
        assert load(tmp_path).attrs["state"] == "running"
        os.kill(process.pid, signum)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    # Before and after it is finalized.
    for _ in range(2):
        assert mmm.history.state(tmp_path) == state
        assert (load(tmp_path).attrs["state"], load(tmp_path).attrs.get("error")) == (state, message)
        finalize(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["state"] == state


def test_a_run_that_ended_before_its_dataset_was_in_place(tmp_path, monkeypatch):
    """`launch` gives a rank a second; the dataset may take longer."""

    def cut_off(*args):
        raise MemoryError

    write_config(tmp_path, {})
    history = History(tmp_path, ranks=[{}], flush_every=1)
    history.update({"loss": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr("mmm.history.record.dataset.write_dataset", cut_off)
        with pytest.raises(MemoryError):
            history.close(RuntimeError("no"))
    leave_as_killed(history)
    for _ in range(2):
        assert mmm.history.state(tmp_path) == "failed"
        assert load(tmp_path).attrs["error"] == "RuntimeError: no"
        finalize(tmp_path)


def test_a_record_that_says_nothing_is_a_finished_one(tmp_path):
    record(tmp_path)
    dataset = load(tmp_path)
    del dataset.attrs["state"]
    dataset.to_netcdf(tmp_path / "train_dataset.h5", engine="h5netcdf")
    (tmp_path / "config.json").write_text("[]")
    assert mmm.history.state(tmp_path) == "finished"


RANKS = """
import os, sys, time
from mmm.history import History, write_config
rank, ends = os.environ["RANK"], sys.argv[1]
if rank == "1":
    while not os.path.exists("ready"): time.sleep(0.01)
    raise ValueError("no such thing")
write_config("run", {})
with History("run", ranks=[{}, {}], flush_every=1) as history:
    history.update({"loss": 1.0})
    open("ready", "w").close()
    if ends == "waits": time.sleep(60)
    raise RuntimeError("[gloo] Connection closed by peer")
"""


@pytest.mark.parametrize("ends", ["waits", "loses"])
def test_another_ranks_failure(tmp_path, ends):
    """Rank 0 waits until launch ends it, or loses rank 1 before launch has said a word."""
    launcher = Launcher(tmp_path)
    (tmp_path / "run").mkdir()
    launcher.write("t.py", RANKS)
    assert launcher.run("-n", "2", "python3", "t.py", ends, clocks={"GRACE": 80.0}).returncode == 1
    dataset = load(tmp_path / "run")
    assert dataset.attrs["state"] == "failed"
    assert dataset.attrs["error"] == f"rank 1 on {socket.gethostname()}: ValueError: no such thing"
    assert dataset.sizes["draw"] == 1
