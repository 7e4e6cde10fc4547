"""The flags of what is watched of a run besides its record: the group ``profile``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import tyro

from mmm.errors import ConfigError
from mmm.history.record.trackers import check_tracker

PACKAGES = {"torch": "torch", "pyinstrument": "pyinstrument"}  # by kind, what it needs


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Some steps in detail, and rows where others look for them."""

    tracker: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """Rows go there as well, in the run's folder. wandb is offline, and mlflow a folder, unless WANDB_MODE or
    MLFLOW_TRACKING_URI says otherwise."""
    project: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """With --tracker, the project of wandb, or experiment of mlflow, that the run belongs to. Default: what
    WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says, else mmm."""
    fingerprints: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    """Keep fingerprints of batch, loss, gradients and weights, every so many steps: `mmm diverge` finds by them where
    two runs part, whatever their layouts."""
    profile: Literal["torch", "pyinstrument"] | None = None
    """torch: PyTorch's profiler on each rank; traces/rank-0.json.gz, … in the run's folder, for ui.perfetto.dev.
    pyinstrument: Python's calls on rank 0; profile.html and profile.txt."""
    profile_steps: Annotated[str | None, tyro.conf.arg(metavar="FROM:TO")] = None
    """With --profile, which steps, TO not among them. Default: three, after the first three."""
    profile_ranks: int | None = None
    """With --profile torch, how many ranks, from 0 on. Default: 64, or all where there are fewer."""

    def check(self) -> None:
        """Raises ConfigError: a value that is wrong, or has no effect, or a package that is not installed."""
        check_tracker(self.tracker, self.project)
        if self.fingerprints is not None and self.fingerprints < 1:
            raise ConfigError(f"--fingerprints {self.fingerprints}: it must be at least 1, the steps between two")
        if self.profile is None and (self.profile_steps or self.profile_ranks):
            flag = "profile_steps" if self.profile_steps else "profile_ranks"
            raise ConfigError(f"--{flag} without --profile: nothing is profiled; leave it out, or give --profile torch")
        if self.profile == "pyinstrument" and self.profile_ranks is not None:
            raise ConfigError("--profile_ranks with --profile pyinstrument, which profiles rank 0 alone: leave it out")
        if self.profile is not None and find_spec(package := PACKAGES[self.profile]) is None:
            raise ConfigError(
                f"--profile {self.profile} needs the package {package}, which is not installed: pip install {package}"
            )
        if self.profile_steps is not None:
            parse_steps(self.profile_steps)
        if self.profile_ranks is not None and self.profile_ranks < 1:
            raise ConfigError(f"--profile_ranks {self.profile_ranks}: it must be at least 1")


def parse_steps(text: str) -> range:
    """Raises ConfigError where it is not FROM:TO."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--profile_steps {text}: give FROM:TO, such as 10:13 for the steps 10, 11 and 12")
    return range(int(first), int(end))
