"""``mmm runs``: which folders are runs, what the table says of each, and what it leaves out. ``mmm history`` of a run
that is under way: what is left, how old its last row and checkpoint are, who is slow."""

import json
import math
import os
import time

import numpy as np
import pytest
import xarray

from mmm.history import History, write_config
from mmm_lab.cli import runs as command
from mmm_lab.cli.main import main as mmm
from mmm_lab.runs.run_folders import run_folders
from mmm_lab.runs.runs import read_run, run_of
from support.processes import leave_as_killed


def made_run(folder, losses, error=None, ranks=2, every=1, **more):
    """A run that has logged every `every`-th step, each of 36 s at 10 tokens/s."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"lr": 0.1, "outdir": str(folder)} | more.pop("options", {})
    config = {"module": "lm", "layout": "dp2", "steps": 8, "options": options, "ranks": [{}] * ranks}
    write_config(folder, config | more)
    history = History(folder, ranks=[{"host": "a"}] * ranks, flush_every=1)
    for row, loss in enumerate(losses):
        history.update({"iter": every * row, "loss": loss, "tps": 10.0, "dt": 36.0}, {"dt": [36.0] * ranks})
    if error is not False:
        history.close(error)
    return history


def table(capsys, *argv):
    assert command.main([*map(str, argv)]) == 0
    out = capsys.readouterr()
    head, *lines = out.out.splitlines()
    return head.split("  "), [line.split() for line in lines], out.err


def test_the_table(tmp_path, capsys):
    made_run(tmp_path / "b", [3.0, 2.0, 1.5], every=2, options={"dim": 16, "lora_targets": []})
    made_run(tmp_path / "lm" / "a", [3.0, 1.0], ValueError("no"), options={"lr": 0.2, "dim": 16})
    running = made_run(tmp_path / "c", [5.0, 4.0, 3.0, 2.5], False, options={"dim": 16, "lora_targets": ["all"]})
    _, lines, err = table(capsys, tmp_path, "--sort", "loss", "--json", tmp_path / "t.json")
    running.close()
    assert err == ""
    assert lines[0][:10] == ["lm/a", "failed", "-", "dp2", "2/8", "1.0000", "-", "10.0", "t/s", "0.02"]
    assert lines[1][:10] == ["b", "finished", "-", "dp2", "5/8", "1.5000", "-", "10.0", "t/s", "0.05"]
    assert lines[2][:10] == ["c", "running", "-", "dp2", "4/8", "2.5000", "-", "10.0", "t/s", "0.04"]
    # An empty list of matrices is the default, and says nothing.
    flags = [["0.04", "lr=0.2"], ["0.1", "lr=0.1"], ["0.08", "lr=0.1", 'lora_targets=["all"]']]
    assert [line[10:] for line in lines] == flags
    told = json.loads((tmp_path / "t.json").read_text())
    assert [row["name"] for row in told] == ["lm/a", "b", "c"]
    assert told[0]["flags"] == {"lr": 0.2}
    assert told[0]["error"] == "ValueError: no"
    # Two ranks, five steps of 36 s.
    assert told[1]["device_hours"] == pytest.approx(2 * 5 * 36 / 3600)


def test_device_hours_of_a_run_that_was_resumed_on_one_rank(tmp_path):
    """All rows times the ranks of the last start: two of these three steps were made by two ranks."""
    nothing = np.nan
    seconds = [[36.0, 36.0], [36.0, 36.0], [36.0, nothing]]
    dataset = xarray.Dataset({"iter": ("draw", [0, 1, 2]), "dt": (("draw", "rank"), seconds)})
    made_run(tmp_path, [1.0], ranks=1)
    assert run_of(tmp_path, dataset).device_hours == pytest.approx(5 * 36 / 3600)


def test_a_killed_run_and_one_that_has_no_value_to_sort_by(tmp_path, capsys):
    made_run(tmp_path / "a", [])
    killed = made_run(tmp_path / "b", [2.0], False)
    # Without an end
    leave_as_killed(killed)
    _, lines, _ = table(capsys, tmp_path, "--sort", "loss", "--reverse")
    assert [line[:2] for line in lines] == [["b", "killed"], ["a", "finished"]]


def test_what_is_no_run_is_left_out_in_a_line(tmp_path, capsys):
    made_run(tmp_path / "run", [2.0])
    for name, file, content in (
        ("foreign", "config.json", '{"architectures": []}'),
        ("damaged", "train_dataset.h5", "not HDF5"),
        ("torn", "journal.jsonl", "{"),
        # Inside a run, not looked at.
        ("run/plots", "config.json", "{"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "train_dataset.h5")
    _, lines, err = table(capsys, tmp_path)
    assert [line[0] for line in lines] == ["run"]
    assert len(err.splitlines()) == 4
    assert all(line.startswith("left out: ") for line in err.splitlines())


def test_a_run_whose_loss_is_no_number_any_more(tmp_path, capsys):
    """It does not stand in the table with its last good loss; a run that validates in rows of its own does."""
    made_run(tmp_path / "bad", [3.0, 2.0, math.nan])
    made_run(tmp_path / "good", [4.0])
    with made_run(tmp_path / "val", [5.0], False) as history:
        history.update({"iter": 1, "val_loss": 4.0})
    _, lines, _ = table(capsys, tmp_path, "--sort", "loss", "--json", tmp_path / "t.json")
    assert [(line[0], line[5]) for line in lines] == [("good", "4.0000"), ("val", "5.0000"), ("bad", "nan")]
    # NaN is no JSON
    told = json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    assert [row["loss"] for row in told] == [4.0, 5.0, "nan"]


def test_rows_of_every_other_step(tmp_path, capsys):
    """A row that is logged every second step stands for two; another folder is no flag that differs."""
    made_run(tmp_path / "a", [3.0, 2.0, 1.0])
    made_run(tmp_path / "b", [3.0, 2.0, 1.0], every=2)
    table(capsys, tmp_path, "--json", tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())
    assert [row["hours"] for row in told] == pytest.approx([0.03, 0.05])
    assert [row["flags"] for row in told] == [{}, {}]


def test_what_the_user_can_fix(tmp_path, capsys):
    for argv, message in (
        ([str(tmp_path)], "holds no run"),
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path), "--sort", "speed"], "--sort: invalid choice: 'speed'"),
    ):
        assert mmm(["runs", *argv]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert len(err.splitlines()) == 1


def test_rows_of_a_record_that_went_on(tmp_path):
    """A dataset and a journal behind it; of a row that is in both the journal's counts; by rank the median."""
    made_run(tmp_path, [3.0, 2.0], ranks=3)
    rows = [(1, 2.0, [1, 2, 3]), (2, 1.0, [1, 2, 9])]
    lines = [{"draw": d, "row": {"iter": d, "loss": x, "new": 7}, "per_rank": {"dt": t}} for d, x, t in rows]
    header = {"mmm_journal": 1, "ranks": [{}] * 3, "attrs": {}}
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    assert run_folders(tmp_path) == [tmp_path]
    run = read_run(tmp_path)
    assert run.rows["loss"].tolist() == [3, 2, 1]
    assert run.rows["dt"].tolist() == [36, 2, 2]
    assert run.seconds.tolist() == [36, 2, 2]


STEPS = 10


def begun(folder, rows=3, dt=30.0):
    """A run that is under way."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, {"module": "lm", "layout": "dp2", "steps": STEPS})
    history = History(folder, ranks=[{}], flush_every=1)
    for step in range(rows):
        history.update({"iter": step, "loss": 3.0 - step, "tps": 1500.0, "dt": dt})
    return history


@pytest.fixture
def run(tmp_path):
    with begun(tmp_path / "runs" / "a") as history:
        yield history


def aged(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def shown(folder, capsys):
    """The lines of the summary by their names."""
    assert mmm(["history", str(folder)]) == 0
    table = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    return {line[2:13].strip(): line[13:] for line in table}


def test_what_is_left_and_what_is_saved(run, capsys):
    for step in (2, 3):
        (run.outdir / "checkpoints" / f"step-{step}").mkdir(parents=True)
    aged(run.outdir / "checkpoints" / "step-3", 7200)
    table = shown(run.outdir, capsys)
    assert table["state"] == "running"
    assert table["left"].startswith("7 of 10 steps, 4 min")
    assert table["last row"].startswith("written ")
    assert table["checkpoint"] == "step-3, saved 2.0 h ago"


def test_a_run_that_is_over_has_nothing_left(tmp_path, capsys):
    begun(tmp_path / "a").close()
    assert not shown(tmp_path / "a", capsys).keys() & {"left", "last row", "checkpoint"}


def test_a_run_without_rows(tmp_path, capsys):
    with begun(tmp_path / "a", rows=0):
        assert shown(tmp_path / "a", capsys)["left"] == "10 of 10 steps"


@pytest.mark.parametrize(("dt", "message"), [(1.0, "silent for 4 min"), (30.0, "written 4 min ago")])
def test_a_silent_run_is_one_that_misses_its_own_pace(tmp_path, dt, message, capsys):
    with begun(tmp_path / "a", dt=dt) as history:
        aged(tmp_path / "a" / "journal.jsonl", 240)
        assert shown(tmp_path / "a", capsys)["last row"] == message
        history.update({"iter": 3, "loss": 0.5, "dt": dt})
        assert "silent" not in shown(tmp_path / "a", capsys)["last row"]


@pytest.mark.parametrize(("own", "slow"), [(0.5, True), (0.11, False)])
def test_a_rank_that_has_become_slow_is_named(tmp_path, capsys, own, slow):
    """Of the newest rows: before, it had been as fast as the others."""
    ranks = [{"host": f"n{rank}"} for rank in range(3)]
    with History(tmp_path, ranks=ranks, flush_every=1) as history:
        for step in range(160):
            # Rank 1 becomes slow in the last third.
            work = own if step > 105 else 0.1
            history.update({"iter": step, "loss": 1.0}, {"dt": [0.5] * 3, "dt_own": [0.1, work, 0.1]})
        assert shown(tmp_path, capsys)["slowest"].startswith("rank 1 (host n1") is slow


def test_a_run_that_can_no_longer_save_says_so(run, capsys):
    notes = ["other", "no checkpoint of step 2: [Errno 28] No space left on device"]
    write_config(run.outdir, {"steps": STEPS, "notes": notes})
    assert shown(run.outdir, capsys)["checkpoint"] == notes[1]
    # It is saved again.
    (run.outdir / "checkpoints" / "step-3").mkdir(parents=True)
    for attribute in (notes, "none", [1]):
        write_config(run.outdir, {"steps": STEPS, "notes": attribute})
        assert shown(run.outdir, capsys)["checkpoint"].startswith("step-3, saved ")
        assert "no checkpoint" not in shown(run.outdir, capsys)["checkpoint"]
