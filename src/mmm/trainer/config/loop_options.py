"""Flags of the shared training loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mmm.errors import ConfigError
from mmm.history.trackers import check_tracker
from mmm.trainer.config.options import Need, RunOptions
from mmm.trainer.config.profile_options import ProfileOptions

SAVES = Need(
    lambda options, layout: options.checkpoint_every is not None,
    "--checkpoint_every",
    "nothing is saved",
    "--checkpoint_every 100",
)


WSD = Need(
    lambda options, layout: options.lr_schedule == "wsd",
    "--lr_schedule wsd",
    "the learning rate falls all along",
    "--lr_schedule wsd",
)


@dataclass(frozen=True, kw_only=True)
class LoopOptions(ProfileOptions, RunOptions):
    """Flags of the shared training loop, on top of every run's, whatever it trains."""

    # fp16 takes the loss scale of the loop.
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"  # type: ignore[assignment]
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""
    max_norm: float = 0.0
    """Clip the gradient's norm to this; 0 leaves it."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Of a step with a loss or gradient that is not finite. stop: it ends the run. skip: all ranks leave weights and
    optimizer as they are, and go on."""
    tracker: Literal["tensorboard", "wandb", "mlflow"] | None = None  # type: ignore[assignment]
    """Rows go there as well, in the run's folder. wandb is offline, and mlflow a folder, unless WANDB_MODE or
    MLFLOW_TRACKING_URI says otherwise."""
    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""
    checkpoint_every: int | None = None  # type: ignore[assignment]
    """Steps between two checkpoints, checkpoints/step-N of the run's folder; one more at the end. Default: none."""
    keep: int | None = None
    """With --checkpoint_every, how many of the newest stay. Default: 2."""
    keep_every: int | None = None
    """With --checkpoint_every, those of every so many steps stay as well."""
    checkpoint_mode: Literal["async", "blocking"] | None = None
    """With --checkpoint_every. async: training goes on while a checkpoint is written, so a kill may go back to the one
    before that. blocking: training waits, and a kill loses at most one interval. Default: async."""
    resume: Path | None = None  # type: ignore[assignment]
    """Go on from a checkpoint, on any layout: a run's folder, one of its checkpoints/step-N, or auto: the newest whole
    one in --outdir, in the same record; from the beginning where there is none yet."""
    replica: int | None = None  # type: ignore[assignment]
    """Steps between two copies of the run's state in the memory of its hosts, from which the ranks that are left go on
    (`launch --elastic`, and on one host `launch --retries`). Default: none."""
    NEEDS: ClassVar[dict[str, Need]] = {
        "keep": SAVES,
        "keep_every": SAVES,
        "checkpoint_mode": SAVES,
        "replica": SAVES,
    }

    def check(self) -> None:
        super().check()
        check_tracker(self.tracker)
        self.check_profile()
        for name in ("checkpoint_every", "keep", "keep_every", "replica"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name} {value}: it must be at least 1")
        if self.resume is not None and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other: leave one out")
        if self.resume == Path("auto") and self.outdir is None:
            raise ConfigError("--resume auto without --outdir: each run then has a folder of its own; give --outdir")
        if not 0 <= self.max_norm < math.inf:
            raise ConfigError(
                f"--max_norm {self.max_norm}: it must be a number from 0 on, and finite; 0 leaves the gradient as it is"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LoopOptions):
    """Flags of the shared training loop for a deep model that is trained step by step."""

    NEEDS: ClassVar[dict[str, Need]] = {"decay": WSD}
    warmup: int = 0
    """Steps over which the learning rate rises; then --lr_schedule."""
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up. cosine: falls as half a cosine. wsd: stays, and falls in a line over --decay steps."""
    decay: int | None = None
    """With --lr_schedule wsd, the last steps, over which the learning rate falls. Default: a fifth of the run."""
    weight_decay: float | None = None
    """Part of a weight that AdamW takes off a step, times the learning rate. Default: PyTorch's, 0.01."""
    decayed: Literal["all", "matrices"] = "all"
    """What that is taken off. matrices: not off norms and biases, which have one dim."""
    eval_every: int = 0
    """Steps between two evaluations; 0: at the end alone."""

    def check(self) -> None:
        super().check()
        for name in ("warmup", "eval_every", "decay"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: it must not be negative")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight_decay {self.weight_decay}: it must be a number from 0 on, and finite")
        for name, value in (("weight_decay", self.weight_decay), ("decayed", self.decayed)):
            if self.optimizer == "sgd" and value not in (None, "all"):
                raise ConfigError(f"--{name} {value} with --optimizer sgd, which has no weight decay: leave it out")
