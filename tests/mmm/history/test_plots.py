"""Plots exist and show something; a plot that fails costs a warning; the command prints a summary. Who the others wait
for: a rank, or nobody; and the table of it."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import xarray

from mmm.errors import RecordError
from mmm.history import History, load, plot_summary, terminal_plot
from mmm.history.plots import draw, summary
from mmm.history.plots.own_work import communication_to_computation, slow
from mmm.history.plots.series import metrics
from mmm.history.plots.style import style
from mmm.history.plots.summary import summary_figure
from mmm_lab.cli import history as command
from mmm_lab.cli.history_ranks import slowest_text
from support.processes import leave_as_killed

# Two hosts of two ranks, which tp joins.
RANKS = [{"rank": r, "local_rank": r % 2, "host": f"node{r // 2}", "tp": r % 2} for r in range(4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """30 rows of 4 ranks, rank 2 slow, the others waiting for it, a slow first step, val_loss on every tenth row."""
    folder = tmp_path_factory.mktemp("outputs") / "module" / "run"
    with History(folder, ranks=RANKS) as history:
        for step in range(30):
            row = {"iter": step, "loss": 10.0 / (step + 1)}
            row["sps"] = 80.0 + step % 3 if step else 1.0
            if step % 10 == 9:
                row["val_loss"] = row["loss"] + 0.1
            seconds = 0.1 if step else 5.0
            forward = [seconds * factor for factor in (1.0, 1.01, 1.5, 1.03)]
            backward = [0.2] * 4
            own = [sum(parts) for parts in zip(forward, backward, strict=True)]
            # Rank 1 waits a little after its step is over.
            dt = [max(own), max(own) + 0.01, max(own), max(own)]
            history.update(row, {"dt": dt, "dtf": forward, "dtb": backward, "dt_own": own})
    return folder


def test_a_run_has_a_picture_and_a_text(run):
    assert set(metrics(load(run))) == {"loss", "sps", "val_loss", "dt", "dtf", "dtb", "dt_own"}
    drawn = plot_summary(load(run), run, (".png", ".svg"))
    names = [str(path.relative_to(run / "plots")) for path in drawn]
    assert names == ["mplot/pngs/summary.png", "mplot/svgs/summary.svg", "tplot/summary.txt"]
    assert all(path.stat().st_size for path in drawn)
    assert "training loss" in drawn[-1].read_text()


def test_a_picture_that_fails_is_a_warning(run, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(summary, "summary_figure", broken)
    assert [path.name for path in plot_summary(load(run), run)] == ["summary.txt"]
    assert "no fonts" in caplog.text
    # Nobody is told of a picture that is not there.
    assert draw.main([str(run)]) == 1


@pytest.mark.long
def test_a_backend_of_a_notebook_is_no_hindrance(run):
    shutil.rmtree(run / "plots", ignore_errors=True)
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    subprocess.run([sys.executable, "-m", "mmm.history.plots.draw", str(run)], env=environment, check=True)
    assert (run / "plots/mplot/pngs/summary.png").exists()


def test_unknown_metric_names_the_known(run):
    with pytest.raises(RecordError, match=r"no 'lost'.*loss, sps"):
        terminal_plot(load(run), "lost")


@pytest.mark.parametrize("iters", [[1e30], [1e30, 1e30], [2**60, 2**60 + 1]])
def test_steps_that_a_plot_cannot_tell_apart_are_drawn_without_a_word_in_colours(tmp_path, capfd, iters):
    with History(tmp_path, ranks=[{}]) as history:
        for iteration in iters:
            history.update({"iter": iteration, "loss": 1.0}, {})
    assert "loss" in terminal_plot(load(tmp_path), "loss")
    assert "\x1b" not in "".join(capfd.readouterr())


def test_the_straggler_is_named_by_its_own_work(run, capsys):
    assert command.main([str(run), "--metric", "loss"]) == 0
    out = capsys.readouterr().out
    waiting = dict(command.summary(load(run), "finished"))["waiting"]
    assert waiting.startswith("for other ranks: ")
    assert waiting.endswith(" s per second of computation")
    for text in ("finished", "30 rows", "4 ranks", "2 hosts", "loss       0.333333", "training loss"):
        assert text in out
    message = "rank 2 (host node1, local_rank 0, tp 0): 0.049 s more work than the median rank in a step of 0.36 s"
    assert message in out
    assert command.main([str(run), "--ranks"]) == 0
    # There is one answer.
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("full_ranks", [64, 2], ids=["by rank", "reduced"])
def test_a_rank_that_is_named_although_no_own_work_was_timed(tmp_path, full_ranks):
    with History(tmp_path, ranks=RANKS, full_ranks=full_ranks) as history:
        history.update({}, {"dt": [0.5, 0.5, 0.51, 0.5], "dtw": [0.1, 0.3, 0.4, 0.0]})
    assert slowest_text(load(tmp_path)) == ""


def test_the_command_finalizes_and_plots(tmp_path, capsys):
    history = History(tmp_path, ranks=[{}], flush_every=1)
    history.update({"loss": 1.5})
    assert command.main([str(tmp_path)]) == 0
    assert "running" in capsys.readouterr().out
    with pytest.raises(RecordError, match="still writing"):
        command.main([str(tmp_path), "--finalize"])
    # What a kill leaves: the file, and no lock on it.
    leave_as_killed(history)
    assert command.main([str(tmp_path), "--finalize", "--plots"]) == 0
    assert "3 plots in" in capsys.readouterr().out
    assert (tmp_path / "train_dataset.h5").exists()


def test_a_run_by_epochs_shows_its_losses_and_its_accuracy(tmp_path):
    with History(tmp_path / "run", ranks=RANKS[:1]) as history:
        for epoch in range(1, 5):
            row = {"epoch": epoch, "train_loss": 1 / epoch, "test_loss": 2 / epoch, "test_acc": 90.0 + epoch}
            history.update(row, {"dt": [3.0], "dtf": [1.0], "dtb": [2.0]})
    with style():
        figure = summary_figure(load(tmp_path / "run"), "run")
    losses, accuracy, times = figure.axes
    assert losses.get_title(loc="left") == "Training loss"
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["train_loss", "test_loss"]
    assert accuracy.get_ylabel() == "test_acc [%]"
    assert times.get_title(loc="left") == "Time of an epoch"


def test_the_limits_have_the_validation_loss_inside(tmp_path):
    with History(tmp_path / "run", ranks=RANKS[:1]) as history:
        for step in range(30):
            row = {"iter": step, "loss": 3.0 - 0.01 * step}
            if step == 9:
                row["val_loss"] = 1.0
            history.update(row)
    figure = summary_figure(load(tmp_path / "run"), "run")
    assert figure.axes[0].get_ylim()[0] < 1.0


def record(own, dt=1.0):
    """A record of steps of `dt` seconds.

    Args:
        own: (rows, ranks), seconds in which each rank did not wait.
    """
    by_rank = ("draw", "rank")
    own = np.array(own, float)
    return xarray.Dataset({"dt_own": (by_rank, own), "dt": (by_rank, np.broadcast_to(dt, own.shape))})


def test_a_rank_over_the_median_rank():
    # The first row is not in it.
    slowest = slow(record([[9, 0, 0, 0], [0.1, 0.1, 0.5, 0.2], [0.1, 0.1, 0.5, 0.2]]))
    assert (slowest.rank, slowest.rows, slowest.of) == (2, 2, 2)
    assert slowest.over == pytest.approx(0.4)
    # Of two ranks, over the other.
    assert slow(record([[0.5, 0.1]] * 2)).over == pytest.approx(0.4)
    assert slow(record([[0.5, np.nan, 0.1]] * 2)).rank == 0


@pytest.mark.parametrize(
    "own",
    [
        [[0.1, 0.14, 0.1]] * 3,
        [[0.1, 0.5, 0.1], [0.1, 0.5, 0.1], [0.5, 0.1, 0.1]],
        [[np.nan] * 3] * 3,
        np.zeros((0, 3)),
    ],
    ids=["4 % of a step", "taking turns", "not timed", "no rows"],
)
def test_nobody_holds_up_the_others(own):
    assert slow(record(own)) is None


def test_chance_blames_nobody():
    """Of two equal ranks one has the most in about half of the rows."""
    row = np.arange(41)[:, None] % 20
    assert slow(record(np.where(row < 11, [0.3, 0.1], [0.1, 0.3]))) is None
    assert slow(record(np.where(row < 17, [0.3, 0.1], [0.1, 0.3]))).rank == 0


def test_seconds_waited_for_each_second_of_computation():
    """Two ranks: one computes 3 s of 4, the other 1 s; the first row, which starts what is slow to start, is not in."""
    dt = np.array([[100.0, 100.0], [4.0, 4.0], [4.0, 4.0]])
    own = np.array([[1.0, 1.0], [3.0, 1.0], [3.0, 1.0]])
    assert communication_to_computation(record(own, dt)) == pytest.approx((1 + 3) / (3 + 1))
    # There is no other row.
    assert communication_to_computation(record(own[:1], dt[:1])) == pytest.approx(198 / 2)


def test_waiting_that_is_not_known():
    assert communication_to_computation(record(np.full((3, 2), np.nan), 4.0)) is None
    assert communication_to_computation(record(np.zeros((0, 2)), 4.0)) is None
    # A rank that does not know is left out.
    one = np.where([[True, False]] * 3, 2.0, np.nan)
    assert communication_to_computation(record(one, 4.0)) == 1.0
