"""A run's rows where others look for them, beside the record: TensorBoard, Weights & Biases, MLflow.

Each writes into the run's folder unless its own environment variables name a server. One that fails is given up with a
warning: a run never ends for it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError

PROJECT = "mmm"
PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}  # of the trackers that have projects
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # by name, what it needs
log = logging.getLogger("mmm")
Row = Mapping[str, float | int]


def step_of(row: Mapping[str, Any]) -> int:
    """The step, or epoch, of a row."""
    return int(row.get("iter") or row.get("epoch") or 0)


def name_of(outdir: Path, config: Mapping[str, Any]) -> str:
    """Of a run: --name, or else its folder's."""
    return str(config.get("name") or outdir.name)


class TensorBoardTracker:
    """The folder tensorboard: ``tensorboard --logdir OUTDIR``. It has no projects."""

    def __init__(self, outdir: Path, config: Mapping[str, Any], project: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.kind = str(outdir / "tensorboard"), SummaryWriter
        self.writer: Any = None

    def row(self, step: int, row: Row) -> None:
        if self.writer is None:  # of a run that goes on: what it makes again is hidden
            self.writer = self.kind(self.folder, purge_step=step)
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandbTracker:
    """The folder wandb, for ``wandb sync``; a server where WANDB_MODE says ``online``."""

    def __init__(self, outdir: Path, config: Mapping[str, Any], project: str) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=project, dir=str(outdir), config=dict(config), mode=mode, name=name_of(outdir, config)
        )

    def row(self, step: int, row: Row) -> None:
        self.run.log(dict(row), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflowTracker:
    """The file mlflow.db, for ``mlflow ui --backend-store-uri sqlite:///OUTDIR/mlflow.db``; a server where
    MLFLOW_TRACKING_URI names one. (MLflow 3.17 refuses its older way, a folder of files.)"""

    def __init__(self, outdir: Path, config: Mapping[str, Any], project: str) -> None:
        import mlflow

        self.entities = mlflow.entities
        folder = outdir.resolve()
        self.client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
        known = self.client.get_experiment_by_name(project)
        files = (folder / "mlflow").as_uri()
        experiment = known.experiment_id if known else self.client.create_experiment(project, files)
        self.run = self.client.create_run(experiment, run_name=name_of(outdir, config)).info.run_id
        parameters = [self.entities.Param(name, str(value)[:500]) for name, value in config.items()]
        self.client.log_batch(self.run, params=parameters)

    def row(self, step: int, row: Row) -> None:
        now = int(time.time() * 1e3)
        metrics = [self.entities.Metric(name, value, now, step) for name, value in row.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run)


KINDS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}


def project_of(tracker: str) -> str:
    """The project that a run belongs to: what the tracker's own variable says, or else `PROJECT`."""
    return os.environ.get(PROJECT_VARIABLES.get(tracker, ""), "") or PROJECT


def check_tracker(name: str | None) -> None:
    """Raises ConfigError: a package that is not installed."""
    if name is not None and importlib.util.find_spec(PACKAGES[name]) is None:
        package = PACKAGES[name]
        raise ConfigError(
            f"--tracker {name} needs the package {package}, which is not installed: pip install {package}"
        )


class Tracked:
    """A tracker that is given up once it fails; or none.

    Args:
        name: a key of `KINDS`, or None.
    """

    def __init__(self, name: str | None, outdir: Path, config: Mapping[str, Any]) -> None:
        self.name, self.tracker = name, None
        if name:
            kind = KINDS[name]
            self._try("start", lambda: setattr(self, "tracker", kind(outdir, config, project_of(name))))

    def row(self, row: Row) -> None:
        step = step_of(row)
        if self.tracker is not None:
            self._try("take a row", lambda: self.tracker.row(step, row))

    def close(self) -> None:
        """The run is over."""
        if self.tracker is not None:
            self._try("end", lambda: self.tracker.close())

    def _try(self, what: str, work: Any) -> None:
        try:
            work()
        except Exception as error:  # whatever a tracker raises, the run goes on
            self.tracker = None
            text = str(error).partition("\n")[0] or type(error).__name__
            log.warning("--tracker %s could not %s, and is given up: %s", self.name, what, text)
