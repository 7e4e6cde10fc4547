"""The flags of how a model is trained: the groups ``optimizer``, ``memory``, ``evaluation`` and ``checkpoint``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmm.errors import ConfigError
from mmm.trainer.config.run import BaseOptions, check_counts, check_effect, check_rate


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How weights are updated."""

    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        check_rate(self.lr)


@dataclass(frozen=True, kw_only=True)
class ClippedOptions(OptimizerOptions):
    """How weights are updated, in the shared training loop."""

    max_norm: float = 0.0
    """Clip the gradient's norm to this; 0 leaves it."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Of a step with a loss or gradient that is not finite. stop: it ends the run. skip: all ranks leave weights and
    optimizer as they are, and go on."""

    def check(self) -> None:
        super().check()
        if not 0 <= self.max_norm < math.inf:
            raise ConfigError(
                f"--max_norm {self.max_norm}: it must be a number from 0 on, and finite; 0 leaves the gradient as it is"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduledOptions(ClippedOptions):
    """How weights are updated, along a schedule of the learning rate."""

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

    def check(self) -> None:
        super().check()
        check_counts(0, warmup=self.warmup, decay=self.decay)
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight_decay {self.weight_decay}: it must be a number from 0 on, and finite")
        for name, value in (("weight_decay", self.weight_decay), ("decayed", self.decayed)):
            if self.optimizer == "sgd" and value not in (None, "all"):
                raise ConfigError(f"--{name} {value} with --optimizer sgd, which has no weight decay: leave it out")
        wsd = "--lr_schedule wsd"
        check_effect(self.lr_schedule == "wsd", wsd, "the learning rate falls all along", wsd, decay=self.decay)


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """What is computed again, or compiled."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in backward instead of keeping them."""
    tile: int = 1
    """Tiles of the sequence (of an image, of its patches) that each MLP is computed in, and recomputed in backward:
    1 / tile of its activations."""
    compile: bool = False
    """torch.compile what is known to give right gradients on this layout."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(RecomputeOptions):
    """What is computed in pieces or again, compiled, or kept on the host."""

    loss_chunks: int | None = None
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist. Default: 1, or as many
    as keep them small where they would have more than 1 GB on a rank."""
    offload: bool = False
    """Keep a rank's part of parameters, gradients and optimizer state on the host, and update it there."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """When the model is evaluated."""

    eval_every: int = 0
    """Steps between two evaluations; 0: at the end alone."""

    def check(self) -> None:
        """Raises ConfigError for a number that is too small."""
        check_counts(0, eval_every=self.eval_every)

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after this step of so many."""
        return step == steps - 1 or (self.eval_every > 0 and (step + 1) % self.eval_every == 0)


@dataclass(frozen=True, kw_only=True)
class ValidationOptions(EvaluationOptions):
    """How often to evaluate on the validation text, and on how much of it."""

    eval_every: int = 50
    """Steps between two validations, one more at the end; 0: at the end alone."""
    eval_batches: int = 4
    """Global batches in a validation."""

    def check(self) -> None:
        super().check()
        check_counts(eval_batches=self.eval_batches)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What the run saves, and what it goes on from."""

    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints, checkpoints/step-N of the run's folder; one more at the end. Default: none."""
    keep: int | None = None
    """With --checkpoint_every, how many of the newest stay. Default: 2."""
    keep_every: int | None = None
    """With --checkpoint_every, those of every so many steps stay as well."""
    checkpoint_mode: Literal["async", "blocking"] | None = None
    """With --checkpoint_every. async: training goes on while a checkpoint is written, so a kill may go back to the one
    before that. blocking: training waits, and a kill loses at most one interval. Default: async."""
    resume: Path | None = None
    """Go on from a checkpoint, on any layout: a run's folder, one of its checkpoints/step-N, or auto: the newest whole
    one in --outdir, in the same record; from the beginning where there is none yet."""
    replica: int | None = None
    """Steps between two copies of the run's state in the memory of its hosts, from which the ranks that are left go on
    (`launch --elastic`, and on one host `launch --retries`). Default: none."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        check_counts(
            checkpoint_every=self.checkpoint_every, keep=self.keep, keep_every=self.keep_every, replica=self.replica
        )
        check_effect(
            self.checkpoint_every is not None,
            "--checkpoint_every",
            "nothing is saved",
            "--checkpoint_every 100",
            keep=self.keep,
            keep_every=self.keep_every,
            checkpoint_mode=self.checkpoint_mode,
            replica=self.replica,
        )


def check_resume(checkpoint: CheckpointOptions, run: BaseOptions) -> None:
    """--resume beside --overwrite and --outdir. Raises ConfigError where they contradict each other."""
    if checkpoint.resume is not None and run.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: leave one out")
    if checkpoint.resume == Path("auto") and run.outdir is None:
        raise ConfigError("--resume auto without --outdir: each run then has a folder of its own; give --outdir")
