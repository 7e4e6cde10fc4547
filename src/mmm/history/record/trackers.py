"""A run's rows where others look for them, beside the record: TensorBoard, Weights & Biases, MLflow.

Each writes into the run's folder unless its own environment variables name a server. One that fails is given up with a
warning: a run never ends for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError

PROJECT = "mmm"
log = logging.getLogger("mmm")
Row = Mapping[str, float | int]


def step_of(row: Mapping[str, Any]) -> int:
    """The step, or epoch, of a row."""
    return int(row.get("iter") or row.get("epoch") or 0)


class TensorBoardTracker:
    """The folder tensorboard: ``tensorboard --logdir OUTDIR``. It has no projects."""

    def __init__(self, outdir: Path, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = str(outdir / "tensorboard")
        self.kind = SummaryWriter
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

    def __init__(self, outdir: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT") or PROJECT
        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(project=project, dir=str(outdir), config=dict(config), mode=mode, name=name)

    def row(self, step: int, row: Row) -> None:
        self.run.log(dict(row), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflowTracker:
    """The file mlflow.db, for ``mlflow ui --backend-store-uri sqlite:///OUTDIR/mlflow.db``; a server where
    MLFLOW_TRACKING_URI names one. (MLflow 3.17 refuses its older way, a folder of files.)"""

    def __init__(self, outdir: Path, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self.entities = mlflow.entities
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        folder = outdir.resolve()
        self.client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
        known = self.client.get_experiment_by_name(project)
        files = (folder / "mlflow").as_uri()
        experiment = known.experiment_id if known else self.client.create_experiment(project, files)
        self.run = self.client.create_run(experiment, run_name=name).info.run_id
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


def check_tracker(name: str | None) -> None:
    """Raises ConfigError: a package that is not installed."""
    if name is not None and find_spec(name) is None:
        raise ConfigError(f"--tracker {name} needs the package {name}, which is not installed: pip install {name}")


class Tracked:
    """A tracker that is given up once it fails; or none.

    Args:
        name: a key of `KINDS`, or None.
    """

    def __init__(self, name: str | None, outdir: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self.tracker: Any = None
        if name is not None:
            run_name = str(config.get("name") or outdir.name)
            self.tracker = self._try("start", KINDS[name], outdir, run_name, config)

    def row(self, row: Row) -> None:
        if self.tracker is not None:
            self._try("take a row", self.tracker.row, step_of(row), row)

    def close(self) -> None:
        """The run is over."""
        if self.tracker is not None:
            self._try("end", self.tracker.close)

    def _try(self, verb: str, work: Callable[..., Any], *args: object) -> Any:
        try:
            return work(*args)
        except Exception as error:  # whatever a tracker raises, the run goes on
            self.tracker = None
            text = str(error).partition("\n")[0] or type(error).__name__
            log.warning("--tracker %s could not %s, and is given up: %s", self.name, verb, text)
            return None
