"""`launch --retries` in one --outdir: each attempt has its record, and none hides the first one's failure."""

import pytest

from mmm.errors import RecordError
from mmm.history import History, load, plot_summary, prepare, write_config
from mmm.history.record.attempts import Attempt, make_room


def record(folder, attempt, rows=2):
    write_config(folder, {"attempt": attempt._asdict(), "state": "running"})
    with History(folder, ranks=[{}]) as history:
        for row in range(rows):
            history.update({"loss": float(row)})
    (folder / "log.txt").write_text(f"log of {attempt.number}")


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
