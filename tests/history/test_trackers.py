"""Rows go to trackers as well; one that fails costs a warning."""

import csv
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mmm.errors import ConfigError
from mmm.history import History, load
from mmm.history.trackers import PACKAGES, Tracked, check_tracker
from mmm.trainer import lm
from mmm.trainer.config.command_line import configure

ROWS = [{"iter": 0, "loss": 4.5}, {"iter": 1, "loss": 4.25, "val_loss": 4.75}, {"iter": 2, "loss": 3.5}]


def keep(outdir, tracker, rows=ROWS):
    with History(outdir, ranks=[{"rank": 0}]) as record:
        for row in rows:
            record.update(row)
            tracker.row(row)
    tracker.close()
    return load(outdir)


def table(outdir):
    with open(outdir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_all_rows_and_columns(tmp_path):
    keep(tmp_path, Tracked("csv", tmp_path, {}))
    rows = table(tmp_path)
    assert [row["iter"] for row in rows] == ["0", "1", "2"]
    assert [float(row["loss"]) for row in rows] == [4.5, 4.25, 3.5]
    assert [row["val_loss"] for row in rows] == ["", "4.75", ""]


def test_csv_goes_on(tmp_path):
    first = Tracked("csv", tmp_path, {})
    first.row(ROWS[1])
    again = Tracked("csv", tmp_path, {})
    again.row(ROWS[2] | {"grad_norm": 1.5})
    rows = table(tmp_path)
    assert [row["val_loss"] for row in rows] == ["4.75", ""]
    assert [row["grad_norm"] for row in rows] == ["", "1.5"]


def test_csv_has_a_step_once(tmp_path):
    """A run that goes on from a checkpoint makes some rows again; one that begins anew, all."""
    for first, loss in ((0, 4.0), (2, 3.0), (1, 2.0)):
        again = Tracked("csv", tmp_path, {})
        for step in range(first, 4):
            again.row({"iter": step, "loss": loss})
    rows = table(tmp_path)
    assert [row["iter"] for row in rows] == ["0", "1", "2", "3"]
    assert [float(row["loss"]) for row in rows] == [4.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("planted", ["link", "fifo"])
def test_csv_goes_through_no_link_and_waits_for_no_fifo(tmp_path, caplog, planted):
    other, there = tmp_path / "other", tmp_path / "run" / "metrics.csv"
    other.write_text("iter,loss\n")
    there.parent.mkdir()
    there.symlink_to(other) if planted == "link" else os.mkfifo(there)
    tracked = Tracked("csv", there.parent, {})
    tracked.row(ROWS[0])
    assert other.read_text() == "iter,loss\n"
    assert "could not start, and is given up" in caplog.text
    assert "metrics.csv is there, and is no file" in caplog.text


@pytest.mark.parametrize("when", ["row", "close"])
def test_one_that_fails_costs_a_warning(tmp_path, caplog, monkeypatch, when):
    called = []

    def fails(*given):
        called.append(given)
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr(f"mmm.history.trackers.CSVTracker.{when}", fails)
    found = keep(tmp_path, Tracked("csv", tmp_path, {}))
    assert found.loss.values.tolist() == [4.5, 4.25, 3.5]
    assert [r.message for r in caplog.records if "--tracker" in r.message] == [
        f"--tracker csv could not {'take a row' if when == 'row' else 'end'}, and is given up: no room"
    ]
    assert len(called) == 1


def test_one_that_does_not_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: 1 / 0))
    assert len(keep(tmp_path, Tracked("wandb", tmp_path, {})).loss) == 3
    assert "--tracker wandb could not start, and is given up: division by zero" in caplog.text


def test_what_wandb_is_told(tmp_path, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    keep(tmp_path, Tracked("wandb", tmp_path, {"layout": "tp2"}))
    given = wandb.init.call_args.kwargs
    assert (given["mode"], given["dir"], given["config"]) == ("offline", str(tmp_path), {"layout": "tp2"})
    run = wandb.init.return_value
    assert [(call.args[0]["loss"], call.kwargs["step"]) for call in run.log.call_args_list] == [
        (4.5, 0),
        (4.25, 1),
        (3.5, 2),
    ]
    run.finish.assert_called_once_with()


def test_what_mlflow_is_told(tmp_path, monkeypatch):
    mlflow = MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    keep(tmp_path, Tracked("mlflow", tmp_path, {"layout": "tp2"}))
    mlflow.MlflowClient.assert_called_once_with(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client = mlflow.MlflowClient.return_value
    metrics = [(call.args[0], call.args[1], call.args[3]) for call in mlflow.entities.Metric.call_args_list]
    assert ("val_loss", 4.75, 1) in metrics
    assert len(metrics) == 7
    assert client.log_batch.call_count == 4  # the parameters, and a row a step
    assert client.set_terminated.called


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_one_that_is_not_installed_is_refused_before_the_ranks_meet(name, monkeypatch):
    monkeypatch.setitem(PACKAGES, name, "a_package_that_nobody_has")
    with pytest.raises(ConfigError, match="needs the package a_package_that_nobody_has, which is not installed: pip"):
        lm.train(configure(lm.Config, tracker=name))
    check_tracker(None)
    check_tracker("csv")


@pytest.mark.long
def test_a_run_of_the_trainer(tmp_path):
    flags = {"preset": "debug", "seq_length": 16, "batch_size": 2, "max_iters": 3, "plots": False, "device": "cpu"}
    lm.train(configure(lm.Config, **flags, tracker="csv", outdir=tmp_path, eval_batches=1))
    rows, found = table(tmp_path), load(tmp_path)
    assert [float(row["loss"]) for row in rows] == found.loss.values.tolist()
    assert float(rows[-1]["val_loss"]) == found.val_loss.values[-1]
