"""What each tracker's own package reads back from a run's folder. ``make test-interop`` installs them."""

import time

import pytest

from mmm.history.record.trackers import Tracked

pytestmark = pytest.mark.interop

ROWS = [{"iter": 0, "loss": 4.5}, {"iter": 1, "loss": 4.25, "val_loss": 4.75}, {"iter": 2, "loss": 3.5}]
CONFIG = {"layout": "tp2", "lr": 0.001}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "trials")
    (tmp_path / "log.txt").write_text("[INFO] iter=0 loss=4.5\n")
    return tmp_path


def track(name, folder, caplog):
    tracked = Tracked(name, folder, CONFIG)
    for row in ROWS:
        tracked.row(row)
    tracked.close()
    assert "given up" not in caplog.text


def test_tensorboard(folder, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", folder, caplog)
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(0, 4.5), (1, 4.25), (2, 3.5)]
    assert [(event.step, event.value) for event in read.Scalars("val_loss")] == [(1, 4.75)]


def test_mlflow(folder, caplog):
    import mlflow

    track("mlflow", folder, caplog)
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"layout": "tp2", "lr": "0.001"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 4.5), (1, 4.25), (2, 3.5)]


def test_wandb(folder, caplog):
    """Its file has no public reader: the values are in it as JSON."""
    track("wandb", folder, caplog)
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")

    def places():
        return [path.read_bytes().find(value) for value in (b"4.25", b"4.75", b"3.5", b"trials")]

    deadline = time.monotonic() + 100
    # A process of wandb's own writes it, and ends later.
    while -1 in places() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert places()[0] < places()[2]


def part(name, folder, losses, error=None, closes=True):
    """Send a row for each step of `losses`, as one start of a run does."""
    tracked = Tracked(name, folder, CONFIG)
    for step, loss in losses.items():
        tracked.row({"iter": step, "loss": loss})
    if closes:
        tracked.close(error)


# The losses of a run that ends after four steps.
FIRST = {0: 4.5, 1: 4.25, 2: 4.125, 3: 4.0625}
# From a checkpoint after two steps, so two of them are made again.
SECOND = {2: 5.125, 3: 5.0625, 4: 3.75, 5: 3.5}
# Each step once, though the run wrote some again after it resumed.
ONCE = [(0, 4.5), (1, 4.25), (2, 4.125), (3, 4.0625), (4, 3.75), (5, 3.5)]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (ValueError(), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_a_resumed_run_is_one_run_in_mlflow(folder, caplog, error, status):
    """It was a second run; the first, which was killed, was said to run for ever; steps were in both."""
    import mlflow

    part("mlflow", folder, FIRST, closes=False)
    part("mlflow", folder, SECOND, error)
    assert "given up" not in caplog.text
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
    assert run.info.status == status
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == ONCE


def test_a_resumed_run_is_one_run_in_wandb(folder, caplog):
    """Each part has a file, since nothing is sent offline. `wandb sync` makes one run of files with one id."""
    part("wandb", folder, FIRST)
    part("wandb", folder, SECOND)
    assert "given up" not in caplog.text
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1

    def losses():
        content = b"".join(file.read_bytes() for file in files)
        return [content.count(str(loss).encode()) > 0 for loss in (4.125, 4.0625, 5.125, 5.0625, 3.75)]

    deadline = time.monotonic() + 100
    while not losses()[-1] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert losses() == [True, True, False, False, True]
