"""Rows go to trackers as well; one that fails costs a warning."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mmm.errors import ConfigError
from mmm.history import History, load
from mmm.history.record.trackers import Tracked, check_tracker
from mmm.run.command_line import configure, parse
from mmm.trainer import lm

ROWS = [{"iter": 0, "loss": 4.5}, {"iter": 1, "loss": 4.25, "val_loss": 4.75}, {"iter": 2, "loss": 3.5}]


def keep(outdir, tracker, rows=ROWS):
    with History(outdir, ranks=[{"rank": 0}]) as record:
        for row in rows:
            record.update(row)
            tracker.row(row)
    tracker.close()
    return load(outdir)


def test_one_that_does_not_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: 1 / 0))
    assert len(keep(tmp_path, Tracked("wandb", tmp_path, {})).loss) == 3
    assert "--tracker wandb could not start, and is given up: division by zero" in caplog.text


@pytest.fixture
def packages(monkeypatch):
    """wandb, offline, and mlflow's client."""
    wandb, mlflow = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    # They are installed.
    monkeypatch.setattr("mmm.history.record.trackers.find_spec", lambda package: package)
    wandb.init.return_value.id = "abc"
    wandb.init.return_value.step = 0
    client = mlflow.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "def"
    return wandb, client


def test_the_project(tmp_path, monkeypatch, packages):
    """Named by the tracker's own variable, else mmm."""
    wandb, client = packages
    client.get_experiment_by_name.return_value = None
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)

    def projects():
        for name in ("wandb", "mlflow"):
            Tracked(name, tmp_path, {})
        return wandb.init.call_args.kwargs["project"], client.create_experiment.call_args.args[0]

    assert projects() == ("mmm", "mmm")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert projects() == ("theirs", "mmm")


@pytest.mark.parametrize(("killed", "sent"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2, 1, 2, 3])])
def test_a_resumed_run_continues_the_run_in_the_tracker(tmp_path, packages, killed, sent):
    """It was a second run, which had the steps after the checkpoint once more. Offline wandb may have lost what it had
    in memory when a run was killed: it gets the rows again. Another tracker begins a run."""
    wandb, client = packages
    for name, steps in (("wandb", (0, 1, 2)), ("wandb", (1, 2, 3)), ("mlflow", (3,))):
        tracked = Tracked(name, tmp_path, {})
        for step in steps:
            tracked.row({"iter": step, "loss": 1.0})
        if not killed:
            tracked.close()
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == [None, "abc"]
    assert [call.kwargs["step"] for call in wandb.init.return_value.log.call_args_list] == sent
    assert (client.create_run.call_count, client.update_run.call_count) == (1, 0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_one_that_is_not_installed_is_refused_before_the_ranks_meet(name, monkeypatch):
    monkeypatch.setattr("mmm.history.record.trackers.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        lm.train(configure(lm.Config, tracker=name))
    check_tracker(None)


def test_another_is_a_wrong_value(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lm", "--tracker", "csv"])
    with pytest.raises(ConfigError, match="--tracker 'csv'"):
        parse(lm.Config)


@pytest.mark.long
def test_a_run_of_the_trainer(tmp_path, packages):
    wandb, _ = packages
    flags = {"preset": "debug", "seq_length": 16, "batch_size": 2, "max_iters": 3, "plots": False, "device": "cpu"}
    lm.train(configure(lm.Config, **flags, tracker="wandb", outdir=tmp_path, eval_batches=1))
    rows = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    record = load(tmp_path)
    assert [row["loss"] for row in rows] == record.loss.values.tolist()
    assert rows[-1]["val_loss"] == record.val_loss.values[-1]
