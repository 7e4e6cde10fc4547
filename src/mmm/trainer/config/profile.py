"""The flags of what is watched of a run besides its record: the group ``profile``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import tyro

from mmm.errors import ConfigError
from mmm.history.record.trackers import check_tracker
from mmm.trainer.config.run import check_effect

PACKAGES = {"torch": "torch", "pyinstrument": "pyinstrument"}  # by kind, what it needs


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Some steps in detail, and rows where others look for them."""

    tracker: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """Rows go there as well, in the run's folder. wandb is offline, and mlflow a file, unless WANDB_MODE or
    MLFLOW_TRACKING_URI says otherwise. WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME name the project; default: mmm."""
    fingerprints: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    """Keep fingerprints of batch, loss, gradients and weights, every so many steps: `mmm diverge` finds by them where
    two runs part, whatever their layouts."""
    profile: Literal["torch", "pyinstrument"] | None = None
    """torch: PyTorch's profiler on each of the first 64 ranks; traces/rank-0.json.gz, … in the run's folder, for
    ui.perfetto.dev.
    pyinstrument: Python's calls on rank 0; profile.html and profile.txt."""
    profile_steps: Annotated[str | None, tyro.conf.arg(metavar="FROM:TO")] = None
    """With --profile, which steps, TO not among them. Default: three, after the first three."""

    def check(self) -> None:
        """Raises ConfigError: a value that is wrong, or has no effect, or a package that is not installed."""
        check_tracker(self.tracker)
        if self.fingerprints is not None and self.fingerprints < 1:
            raise ConfigError(f"--fingerprints {self.fingerprints}: it must be at least 1, the steps between two")
        why = "nothing is profiled"
        check_effect(self.profile is not None, "--profile", why, "--profile torch", profile_steps=self.profile_steps)
        if self.profile is not None and find_spec(package := PACKAGES[self.profile]) is None:
            raise ConfigError(
                f"--profile {self.profile} needs the package {package}, which is not installed: pip install {package}"
            )
        if self.profile_steps is not None:
            parse_steps(self.profile_steps)


def parse_steps(text: str) -> range:
    """Raises ConfigError where it is not FROM:TO."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--profile_steps {text}: give FROM:TO, such as 10:13 for the steps 10, 11 and 12")
    return range(int(first), int(end))
