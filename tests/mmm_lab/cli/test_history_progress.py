"""``mmm history`` of a run that is under way: what is left, how old its last row and checkpoint are, who is slow."""

import os
import time

import pytest

from mmm.history import History, write_config
from mmm_lab.campaign.chain import Campaign, Job
from mmm_lab.cli.main import main as mmm

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


@pytest.mark.parametrize(("dt", "said"), [(1.0, "silent for 4 min"), (30.0, "written 4 min ago")])
def test_a_silent_run_is_one_that_misses_its_own_pace(tmp_path, dt, said, capsys):
    with begun(tmp_path / "a", dt=dt) as history:
        aged(tmp_path / "a" / "journal.jsonl", 240)
        assert shown(tmp_path / "a", capsys)["last row"] == said
        history.update({"iter": 3, "loss": 0.5, "dt": dt})
        assert "silent" not in shown(tmp_path / "a", capsys)["last row"]


def test_between_two_jobs_of_a_campaign(tmp_path, capsys):
    folder = tmp_path / "a"
    begun(folder).close(SystemExit(75))
    (folder / "jobs").mkdir()
    campaign = Campaign(folder, "slurm", "lm", "lm.sh", most=3, jobs=[Job("1", 0)], queued="2")
    campaign.write()
    assert "waits for its next job" in shown(folder, capsys)["state"]
    campaign.over = "the run is finished, after 2 jobs"
    campaign.write()
    assert "waits" not in shown(folder, capsys)["state"]


@pytest.mark.parametrize(("own", "slow"), [(0.5, True), (0.11, False)])
def test_a_rank_that_has_become_slow_is_named(tmp_path, capsys, own, slow):
    """Of the newest rows: before, it had been as fast as the others."""
    ranks = [{"host": f"n{rank}"} for rank in range(3)]
    with History(tmp_path, ranks=ranks, flush_every=1) as history:
        for step in range(160):
            work = own if step > 105 else 0.1
            history.update({"iter": step, "loss": 1.0}, {"dt": [0.5] * 3, "dt_own": [0.1, work, 0.1]})
        assert shown(tmp_path, capsys)["slowest"].startswith("rank 1 (host n1") is slow


def test_a_run_that_can_no_longer_save_says_so(run, capsys):
    notes = ["other", "no checkpoint of step 2: [Errno 28] No space left on device"]
    write_config(run.outdir, {"steps": STEPS, "notes": notes})
    assert shown(run.outdir, capsys)["checkpoint"] == notes[1]
    (run.outdir / "checkpoints" / "step-3").mkdir(parents=True)  # it is saved again
    for kept in (notes, "none", [1]):
        write_config(run.outdir, {"steps": STEPS, "notes": kept})
        assert shown(run.outdir, capsys)["checkpoint"].startswith("step-3, saved ")
        assert "no checkpoint" not in shown(run.outdir, capsys)["checkpoint"]
