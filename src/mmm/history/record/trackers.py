"""Sends a run's rows to TensorBoard, Weights & Biases or MLflow, in addition to the record.

Each of these trackers writes into the run's folder, unless its own environment variables name a server. A tracker that
fails is given up with a warning: a run never ends because of it.

A run that is resumed in its folder continues its run in the tracker. It makes the steps after its checkpoint once more.
TensorBoard then shows the new rows of these steps. Weights & Biases and MLflow cannot replace a row, so they keep the
first. What a killed run has left in Weights & Biases offline is not known: there such a step may have two rows.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from mmm.errors import ConfigError
from mmm.history.record.ending import FINISHED, INTERRUPTED, ending_of
from mmm.history.record.folder import TRACKER

PROJECT = "mmm"
log = logging.getLogger("mmm")
Row = Mapping[str, float | int]


def step_of(row: Mapping[str, Any]) -> int:
    """Return the step, or the epoch, of a row."""
    return int(row.get("iter") or row.get("epoch") or 0)


class TensorBoardTracker:
    """Writes into the folder tensorboard, for ``tensorboard --logdir OUTDIR``. TensorBoard has no projects, and no
    runs but folders."""

    run_id = ""
    last = -1

    def __init__(self, outdir: Path, name: str, config: Mapping[str, Any], earlier: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = str(outdir / "tensorboard")
        self.kind = SummaryWriter
        self.writer: Any = None

    def row(self, step: int, row: Row) -> None:
        # In a resumed run, `purge_step` hides the old rows of the steps that are made again.
        if self.writer is None:
            self.writer = self.kind(self.folder, purge_step=step)
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, state: str) -> None:
        if self.writer is not None:
            self.writer.close()


class WandbTracker:
    """Writes into the folder wandb, for ``wandb sync``; to a server if WANDB_MODE is ``online``.

    Offline, each part of a resumed run has a folder of its own, and all of them have the id of one run.
    """

    def __init__(self, outdir: Path, name: str, config: Mapping[str, Any], earlier: str | None) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT") or PROJECT
        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=project,
            dir=str(outdir),
            config=dict(config),
            mode=mode,
            name=name,
            id=earlier,
            resume="allow",
        )
        self.run_id = str(self.run.id)
        # The server knows which steps it has; offline this is -1.
        self.last = self.run.step - 1

    def row(self, step: int, row: Row) -> None:
        self.run.log(dict(row), step=step)

    def close(self, state: str) -> None:
        self.run.finish(exit_code=int(state != FINISHED))


class MLflowTracker:
    """Writes into the file mlflow.db, for ``mlflow ui --backend-store-uri sqlite:///OUTDIR/mlflow.db``.

    If MLFLOW_TRACKING_URI names a server, it sends the rows there. (MLflow 3.17 refuses its older way of writing, a
    folder of files.)
    """

    # Of the record's words for how a run has ended. Any other is a failure.
    STATES: ClassVar = {FINISHED: "FINISHED", INTERRUPTED: "KILLED"}

    def __init__(self, outdir: Path, name: str, config: Mapping[str, Any], earlier: str | None) -> None:
        import mlflow

        self.entities = mlflow.entities
        folder = outdir.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self.client = mlflow.MlflowClient(uri)
        self.last = -1
        if earlier is not None:
            self.run_id = earlier
            # The last row of each metric.
            metrics = self.client.get_run(earlier).data.metrics
            if metrics:
                self.last = step_of(metrics)
            # A run that was killed is still said to be running; one that was stopped runs again.
            self.client.update_run(earlier, status="RUNNING")
            return
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self.client.get_experiment_by_name(project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(project, (folder / "mlflow").as_uri())
        self.run_id = self.client.create_run(experiment_id, run_name=name).info.run_id
        # MLflow refuses longer values.
        parameters = []
        for name, value in config.items():
            parameters.append(self.entities.Param(name, str(value)[:500]))
        self.client.log_batch(self.run_id, params=parameters)

    def row(self, step: int, row: Row) -> None:
        # Milliseconds since 1970.
        now = int(time.time() * 1e3)
        metrics = []
        for name, value in row.items():
            metrics.append(self.entities.Metric(name, value, now, step))
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, state: str) -> None:
        self.client.set_terminated(self.run_id, self.STATES.get(state, "FAILED"))


KINDS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}


def check_tracker(name: str | None) -> None:
    """Check that a tracker's package is installed; raises ConfigError if not.

    Args:
        name: a key of `KINDS`; None: no tracker was asked for.
    """
    if name is None:
        return
    if find_spec(name) is None:
        raise ConfigError(f"--tracker {name} needs the package {name}, which is not installed: pip install {name}")


class Tracked:
    """A tracker that is given up once it fails.

    A file of the run's folder has the tracker's name, the id of its run, and the last step that it is certain to have.

    Args:
        name: a key of `KINDS`.
        outdir: the run's folder.
        config: the run's settings, for the tracker to show.
    """

    def __init__(self, name: str, outdir: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self.tracker: Any = None
        self.file = outdir / TRACKER
        # The last step that the tracker has from before this start of the run, and the last one that it has now.
        self.before = -1
        self.last = -1
        self._try("start", self._start, outdir, config)

    def _start(self, outdir: Path, config: Mapping[str, Any]) -> None:
        earlier = None
        if self.file.exists():
            name, run_id, step = self.file.read_text().split(" ")
            if name == self.name:
                earlier = run_id
                self.before = int(step)
        run_name = str(config.get("name") or outdir.name)
        self.tracker = KINDS[self.name](outdir, run_name, config, earlier)
        self.before = max(self.before, self.tracker.last)
        self._note(self.before)

    def row(self, row: Row) -> None:
        """Send a row to the tracker, unless it has a row of this step from before the run was resumed."""
        step = step_of(row)
        if self.tracker is not None and step > self.before:
            self.last = step
            self._try("take a row", self.tracker.row, step, row)

    def close(self, error: BaseException | None = None) -> None:
        """End the tracker's run.

        Args:
            error: the exception that has ended the run; None if it finished.
        """
        if self.tracker is not None:
            self._try("end", self._end, ending_of(error).state)

    def _end(self, state: str) -> None:
        self.tracker.close(state)
        # Only now it is certain to have all rows: a tracker may keep some in memory.
        self._note(max(self.before, self.last))

    def _note(self, step: int) -> None:
        if self.tracker.run_id:
            self.file.write_text(f"{self.name} {self.tracker.run_id} {step}")

    def _try(self, verb: str, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:
            # Whatever a tracker raises, the run continues.
            self.tracker = None
            text = str(error).partition("\n")[0] or type(error).__name__
            log.warning("--tracker %s could not %s, and is given up: %s", self.name, verb, text)
