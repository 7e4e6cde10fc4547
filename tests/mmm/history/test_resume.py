"""A record that goes on: one dataset, one curve, marks where; each row once. `launch --retries` in one --outdir: each
attempt has its record, and none hides the first one's failure."""

import os

import numpy as np
import pytest

from mmm.errors import RecordError
from mmm.history import History, load, plot_summary, prepare, write_config
from mmm.history.record.attempts import Attempt, make_room
from mmm.history.record.dataset import marks_of
from mmm.history.record.resume import Resume, check_over
from support.processes import leave_as_killed


def ranks(n):
    return [{"rank": i, "host": f"x{i}", "local_rank": i, "pid": 7, "tp": i} for i in range(n)]


def run(folder, n, first, last, resume=None, kill=False):
    history = History(folder, ranks=ranks(n), flush_every=1, resume=resume)
    for step in range(first, last):
        history.update({"iter": step, "loss": 10.0 - step + 0.001 * n}, {"dt": [float(n)] * n})
    if kill:
        # As the system does with a process that is gone.
        leave_as_killed(history)
    else:
        history.close()


def test_on_five_layouts(tmp_path):
    # Rows 4, 5 and 6 are made again.
    run(tmp_path, 4, 0, 7, kill=True)
    run(tmp_path, 2, 4, 8, Resume(4, {"step": 4, "layout": "dp2"}), kill=True)
    run(tmp_path, 2, 4, 6, Resume(4, {"step": 4, "layout": "dp2"}))
    run(tmp_path, 8, 6, 9, Resume(6, {"step": 6, "layout": "dp8"}))
    run(tmp_path, 1, 8, 10, Resume(8, {"step": 8, "layout": "1"}))
    ds = load(tmp_path)
    assert ds["iter"].values.tolist() == list(range(10))
    assert ds["draw"].values.tolist() == list(range(10))
    worlds = [4] * 4 + [2] * 2 + [8] * 2 + [1] * 2
    expected = [10.0 - i + 0.001 * n for i, n in enumerate(worlds)]
    np.testing.assert_allclose(ds["loss"].values, expected, rtol=1e-12)
    expected = [[n] * n + [np.nan] * (8 - n) for n in worlds]
    np.testing.assert_array_equal(ds["dt"].values, expected)
    assert ds["host"].values.tolist() == [f"x{i}" for i in range(8)]
    marks = [(mark["draw"], mark["layout"]) for mark in marks_of(ds)]
    assert marks == [(4, "dp2"), (4, "dp2"), (6, "dp8"), (8, "1")]
    assert ds.attrs["state"] == "finished"


def test_while_it_runs_and_after_a_kill(tmp_path):
    run(tmp_path, 2, 0, 5)
    started = load(tmp_path).attrs["started"]
    history = History(tmp_path, ranks=ranks(2), flush_every=1, resume=Resume(3, {}))
    assert len(history) == 3
    assert load(tmp_path)["iter"].values.tolist() == [0, 1, 2]
    history.update({"iter": 3, "loss": 1.0})
    ds = load(tmp_path)
    assert ds["iter"].values.tolist() == [0, 1, 2, 3]
    assert ds.attrs["state"] == "running"
    assert ds.attrs["started"] == started
    leave_as_killed(history)
    assert load(tmp_path)["iter"].values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kill", [True, False])
def test_under_another_umask_the_record_is_as_open_as_before(tmp_path, kill):
    before = os.umask(0o022)
    try:
        run(tmp_path, 2, 0, 5, kill=kill)
        os.umask(0o077)
        history = History(tmp_path, ranks=ranks(2), flush_every=1, resume=Resume(3, {}))
        assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o644, 0o644]
        history.close()
        assert (tmp_path / "train_dataset.h5").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_from_an_older_checkpoint_the_marks_beyond_it_go(tmp_path):
    run(tmp_path, 1, 0, 6)
    run(tmp_path, 1, 5, 8, Resume(5, {}))
    run(tmp_path, 1, 2, 4, Resume(2, {}))
    ds = load(tmp_path)
    assert ds["iter"].values.tolist() == [0, 1, 2, 3]
    assert [mark["draw"] for mark in marks_of(ds)] == [2]


def test_without_resume_it_is_refused_as_ever(tmp_path):
    run(tmp_path, 1, 0, 2)
    with pytest.raises(RecordError, match="already holds rows"):
        History(tmp_path, ranks=ranks(1))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecordError, match="already holds a run's record"):
        prepare(tmp_path, "lm")
    prepare(tmp_path, "lm", keeps_record=True)
    assert load(tmp_path)["iter"].values.tolist() == [0, 1]


def test_a_finished_run_without_checkpoints_does_not_begin_again(tmp_path):
    (tmp_path / "config.json").write_text('{"state": "finished"}')
    with pytest.raises(RecordError, match="has finished, and no checkpoint to continue from"):
        check_over(tmp_path, None, False)
    check_over(tmp_path, None, True)


def record(folder, attempt, rows=2):
    write_config(folder, {"attempt": attempt.as_record(), "state": "running"})
    with History(folder, ranks=[{}]) as history:
        for row in range(rows):
            history.update({"loss": float(row)})
    (folder / "log.txt").write_text(f"log of {attempt.retries}")


def test_everything_of_the_record_is_moved_and_nothing_else(tmp_path):
    record(tmp_path, Attempt("x", 0))
    plots = plot_summary(load(tmp_path), tmp_path)
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
