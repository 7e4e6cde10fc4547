"""``mmm watch``: what it says of runs that go on, and when it ends."""

import os
import sys
import time

import pytest

from mmm.campaign.chain import Campaign, Job
from mmm.cli import watch as command
from mmm.cli.main import main as mmm
from mmm.history import History, write_config

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


def test_once(run, capsys):
    for step in (2, 3):
        (run.outdir / "checkpoints" / f"step-{step}").mkdir(parents=True)
    aged(run.outdir / "checkpoints" / "step-3", 7200)
    assert command.main([str(run.outdir), "--once"]) == 0
    status, _, title, *plot = capsys.readouterr().out.splitlines()
    assert status.startswith("a  running  step 3 of 10  loss 1.0000  1,500 tokens/s  4 min left  written ")
    assert status.endswith("s ago  step-3 saved 2.0 h ago")
    assert title.strip() == "training loss (loss)"
    assert plot[-1] == "  a a: 1 at iter 2"


@pytest.mark.parametrize(("dt", "age", "said"), [(1.0, 240, "silent for 4 min"), (30.0, 240, "written 4 min ago")])
def test_a_silent_run_is_one_that_misses_its_own_pace(tmp_path, dt, age, said, capsys):
    with begun(tmp_path / "a", dt=dt) as history:
        aged(tmp_path / "a" / "journal.jsonl", age)
        assert command.main([str(tmp_path / "a"), "--once"]) == 0
        assert said in capsys.readouterr().out
        history.update({"iter": 3, "loss": 0.5, "dt": dt})
        assert command.main([str(tmp_path / "a"), "--once"]) == 0
        assert "silent" not in capsys.readouterr().out  # a new row


def test_on_a_pipe_a_line_at_a_time_until_all_have_ended(run, tmp_path, capsys, monkeypatch):
    begun(tmp_path / "runs" / "old").close()
    other = begun(tmp_path / "runs" / "b")
    ends = iter([lambda: run.close(), lambda: other.close(ValueError("no"))])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(ends)())
    assert command.main([str(tmp_path / "runs")]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["a", "running", "step"],
        ["b", "running", "step"],
        ["a", "finished", "step"],
        ["b", "running", "step"],
        ["a", "finished", "step"],
        ["b", "failed:", "ValueError:"],
    ]


def test_what_is_not_there_yet_ends_nothing(run, tmp_path, capsys, monkeypatch):
    """A metric that comes with a later row; a damaged record beside the run is named once."""
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "journal.jsonl").write_text("{")
    steps = iter([lambda: (run.update({"iter": 3, "val_loss": 2.5, "dt": 1.0}), run.flush()), lambda: run.close()])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(steps)())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert command.main([str(tmp_path / "runs"), "--metric", "val_loss"]) == 0
    out, err = capsys.readouterr()
    assert out.count("not all of these runs have a 'val_loss'") == 1
    assert out.count("validation loss (val_loss)") == 2
    assert [line[:10] for line in err.splitlines()] == ["left out: "]


def campaign_of(folder, **fields):
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    Campaign(folder, "slurm", "lm", "lm.sh", most=3, **fields).write()


def test_it_waits_for_the_jobs_of_a_campaign(tmp_path, capsys, monkeypatch):
    """Before the first job has a record, and between two of them; not after the last."""
    folder, parts = tmp_path / "runs" / "a", []
    campaign_of(folder)
    second = [Job("1", 0, 75), Job("2", 3)]
    steps = iter(
        [
            lambda: parts.append(begun(folder)),
            lambda: (campaign_of(folder, jobs=[Job("1", 0)], queued="2"), parts[0].close(SystemExit(75))),
            lambda: campaign_of(folder, jobs=second, over="the run is finished, after 2 jobs"),
        ]
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: next(steps)())
    assert command.main([str(folder)]) == 0
    first, running, between, last = capsys.readouterr().out.splitlines()
    assert first == "no row yet: the first job waits in the queue, or starts"
    assert running.startswith("a  running  step 3")
    assert between.startswith("a  interrupted: a signal; the state is saved, waits for its next job  step 3")
    assert "waits" not in last
    campaign_of(folder, jobs=second, queued="3")
    assert command.main([str(folder.parent), "--once"]) == 0  # found below a folder as well
    assert "waits for its next job" in capsys.readouterr().out


def test_a_terminal_is_redrawn_until_ctrl_c(run, capsys, monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert command.main([str(run.outdir)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("\x1b[2J\x1b[Ha  running")
    assert out.count("\x1b[2J") == 1
    assert out.count("\x1b[H") == 2
    assert min(looks) >= 5


@pytest.mark.parametrize(("own", "said"), [(0.5, "rank 1 on n1 is slow: 0.4 of 0.5 s a step"), (0.11, "")])
def test_a_slow_rank_is_named(tmp_path, capsys, own, said):
    ranks = [{"host": f"n{rank}"} for rank in range(3)]
    folder = tmp_path / "a"
    folder.mkdir()
    write_config(folder, {"module": "lm", "steps": STEPS, "ranks": ranks})
    with History(folder, ranks=ranks, flush_every=1) as history:
        for step in range(60):
            slow = step > 5 or own < 0.5
            history.update({"iter": step, "loss": 1.0}, {"dt": [0.5] * 3, "dt_own": [0.1, own if slow else 0.1, 0.1]})
        assert command.main([str(folder), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (f"a: {said}" if said else "")


def test_a_run_that_can_no_longer_save_says_so(run, capsys):
    notes = ["other", "no checkpoint of step 2: [Errno 28] No space left on device"]
    write_config(run.outdir, {"steps": STEPS, "notes": notes})
    assert command.main([str(run.outdir), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"a: {notes[1]}"
    (run.outdir / "checkpoints" / "step-3").mkdir(parents=True)  # it is saved again
    for kept in (notes, "none", [1]):
        write_config(run.outdir, {"steps": STEPS, "notes": kept})
        assert command.main([str(run.outdir), "--once"]) == 0
        assert "no checkpoint" not in capsys.readouterr().out


def test_a_run_without_rows_starts(tmp_path, capsys):
    with begun(tmp_path / "a", rows=0):
        assert command.main([str(tmp_path / "a"), "--once"]) == 0
    status, more = capsys.readouterr().out.splitlines()
    assert status.split()[:4] == ["a", "running", "step", "starts"]
    assert more == "no rows yet"


def test_what_the_user_can_fix(tmp_path, capsys):
    begun(tmp_path / "runs" / "old").close()
    for argv, said in (
        ([tmp_path / "runs"], "is running (1 have ended)"),
        ([tmp_path / "none"], "is no folder"),
        ([tmp_path / "runs", "--every", "0"], "--every 0: it must be above 0"),
        ([tmp_path / "runs" / "old", "--metric", "speed", "--once"], "have a 'speed'. All have: loss, tps, dt."),
    ):
        assert mmm(["watch", *map(str, argv)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert len(err.splitlines()) == 1
