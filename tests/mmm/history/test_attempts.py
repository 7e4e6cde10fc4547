"""`launch --retries` in one --outdir: each attempt has its record, and none hides the first one's failure."""

import json
import subprocess
import sys

import pytest

import mmm.history
from mmm.errors import RecordError
from mmm.history import History, load, plot_all, prepare, write_config
from mmm.history.record.attempts import Attempt, make_room
from support.clock import PATIENCE
from support.launcher import Launcher

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from mmm.parallel import Layout
from mmm.runtime.failure import run_main
from mmm.runtime.ranks import whoami
from mmm.trainer.config.run import RunOptions
from mmm.trainer.run.standard import start_run
def main():
    attempt, options = int(os.environ["MMM_ATTEMPT"]), RunOptions(outdir=Path("run"), flush_every=1, plots=False)
    with start_run("test", options, Layout().fit(whoami().world_size)) as run:
        for step in range(3 + attempt):
            run.clock.start()
            run.clock.lap("dtf")
            run.step(step, torch.tensor(1.0 + attempt), samples=1)
        if attempt == 0 and run.rank.is_main:
            raise RuntimeError("the first cause")
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
run_main(main)
"""


@pytest.mark.long
def test_each_attempt_of_a_launch_has_its_record(tmp_path):
    launcher = Launcher(tmp_path)
    launcher.write("t.py", PROGRAM)
    line = ["-n", "2", "--device", "cpu", "--retries", "2", "python3", "t.py"]
    done = launcher.run(*line, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "the first cause" in done.stderr
    assert "already holds" not in done.stderr
    run = tmp_path / "run"
    for number, folder in enumerate((run / "attempt-1", run / "attempt-2", run)):
        dataset = load(folder)
        assert dataset["loss"].values.tolist() == [2.0 * (1 + number)] * (3 + number)  # on each of two ranks 1 + number
        assert (folder / "train_dataset.h5").exists()
        assert (folder / "log.txt").read_text().count("2 ranks (launch)") == 1
    ended = [(mmm.history.state(folder), load(folder).attrs.get("error")) for folder in (run / "attempt-1", run)]
    assert ended == [("failed", "RuntimeError: the first cause"), ("finished", None)]
    assert mmm.history.state(run / "attempt-2") in ("killed", "failed")  # rank 0 may have lost rank 1 before
    notes = json.loads((run / "config.json").read_text())["notes"]
    assert [note.partition(";")[2] for note in notes] == [" its record is in attempt-2"]
    assert notes[0] in (run / "log.txt").read_text()
    assert (
        "attempt 1 of this launch is failed: RuntimeError: the first cause; its record is in attempt-1"
        in (run / "attempt-2" / "log.txt").read_text()
    )
    refused = launcher.run(*line, timeout=PATIENCE)  # another launch: its record is not ours to move
    assert refused.returncode == 2
    assert "already holds a run's record" in refused.stderr


def record(folder, attempt, rows=2):
    write_config(folder, {"attempt": attempt._asdict(), "state": "running"})
    with History(folder, ranks=[{}]) as history:
        for row in range(rows):
            history.update({"loss": float(row)})
    (folder / "log.txt").write_text(f"log of {attempt.number}")


def test_everything_of_the_record_is_moved_and_nothing_else(tmp_path):
    record(tmp_path, Attempt("x", 0))
    plots = plot_all(load(tmp_path), tmp_path)
    (tmp_path / "model.pt").write_text("mine")
    (tmp_path / "plots/mine.png").write_text("mine")
    assert make_room(tmp_path, Attempt("x", 1)) == ("attempt 1 of this launch is finished; its record is in attempt-1")
    moved = tmp_path / "attempt-1"
    assert all((moved / path.relative_to(tmp_path)).exists() for path in plots)
    assert (moved / "log.txt").read_text() == "log of 0"
    assert load(moved).sizes["draw"] == 2
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if moved not in [path, *path.parents])
    assert left == ["model.pt", "plots", "plots/mine.png"]
    assert prepare(tmp_path, "test") == tmp_path


def test_overwrite_does_not_cost_an_earlier_attempts_rows(tmp_path):
    record(tmp_path, Attempt("x", 0))
    make_room(tmp_path, Attempt("x", 1))
    prepare(tmp_path, "test", overwrite=True)
    assert load(tmp_path / "attempt-1").sizes["draw"] == 2


def test_a_name_that_another_launch_has_used(tmp_path):
    record(tmp_path, Attempt("old", 0), rows=5)
    make_room(tmp_path, Attempt("old", 1))
    record(tmp_path, Attempt("x", 0))
    assert make_room(tmp_path, Attempt("x", 3)).endswith("its record is in attempt-1-2")
    assert [load(tmp_path / name).sizes["draw"] for name in ("attempt-1", "attempt-1-2")] == [5, 2]


@pytest.mark.parametrize("this", [None, Attempt("x", 0), Attempt("other", 1)])
def test_any_other_record_stays_and_is_refused(tmp_path, this):
    record(tmp_path, Attempt("x", 0))
    assert make_room(tmp_path, this) is None
    with pytest.raises(RecordError, match="already holds a run's record"):
        prepare(tmp_path, "test")
    (tmp_path / "config.json").write_text("[1]")
    assert make_room(tmp_path, Attempt("x", 1)) is None


def test_hosts_get_it_too():
    """What `launch` gives every rank goes to those on other hosts as well."""
    code = (
        "import sys; from mmm_launch import main; from mmm_launch.program import target\n"
        "from mmm_launch.spec.options import LaunchOptions\n"
        "plan = main.plan_run(target.parse(['python3', 'x.py']), LaunchOptions(hosts='a,b', nproc=2, mpi='hydra',"
        " mpiexec=sys.executable, scheduler='none'), {'MMM_ATTEMPTS_OF': 'x'}); print(plan.variables)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'MMM_ATTEMPTS_OF': 'x'" in done.stdout
