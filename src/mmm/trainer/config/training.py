"""The flags of how the shared loop trains a model: the groups ``run``, ``optimizer``, ``memory``, ``checkpoint``, and
``experts``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mmm.errors import ConfigError
from mmm.optim.adamw import make_optimizer
from mmm.optim.layerwise import make_layerwise
from mmm.trainer.config.run import (
    BaseOptions,
    RowOptions,
    StepOptions,
    check_counts,
    check_effect,
)
from mmm.trainer.config.scaled_lr import ScaledOptions

TrainerDtype = Literal["auto", "fp32", "bf16", "fp16", "fp64"]  # fp16 takes the loss scale of the shared loop


@dataclass(frozen=True, kw_only=True)
class TrainerRun(RowOptions):
    """Where it runs, for how long, and what it leaves."""

    dtype: TrainerDtype = "auto"  # type: ignore[assignment]
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""


@dataclass(frozen=True, kw_only=True)
class EpochRun(StepOptions):
    """Where it runs, for how long, and what it leaves: a row an epoch."""

    dtype: TrainerDtype = "auto"  # type: ignore[assignment]
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Routed experts, in place of feed-forward layers."""

    n_experts: int = 0
    """Experts in each layer; 0: one feed-forward network instead."""
    top_k: int | None = None
    """Experts that each token goes through. Default: 2, or the only one."""
    expert_dim: int | None = None
    """Width of one expert. Default: that of the preset's feed-forward layer."""
    balance_rate: float | None = None
    """How far a step moves the bias of an expert that had more, or less, than the mean load; 0: never. Default: 0.01;
    runs of many thousand steps take less: 0.001."""

    def check(self) -> None:
        """Raises ConfigError: a number of experts, or a rate, below 0; a flag that has no effect."""
        if self.n_experts < 0:
            raise ConfigError(f"--n_experts {self.n_experts}: it must not be negative")
        if not 0 <= self.balance() < math.inf:
            raise ConfigError(f"--balance_rate {self.balance_rate}: it must be a number from 0 on, and finite")
        given = {"top_k": self.top_k, "expert_dim": self.expert_dim, "balance_rate": self.balance_rate}
        check_effect(self.n_experts > 0, "--n_experts", "there are no experts", "--n_experts 8", **given)

    def balance(self) -> float:
        """`balance_rate`, or what stands for it."""
        return 0.01 if self.balance_rate is None else self.balance_rate

    def sizes(self) -> dict[str, Any]:
        """Fields of a model's sizes; none without experts."""
        if not self.n_experts:
            return {}
        top_k = min(2, self.n_experts) if self.top_k is None else self.top_k
        return {"n_experts": self.n_experts, "top_k": top_k, "expert_dim": self.expert_dim}


@dataclass(frozen=True, kw_only=True)
class ClippedOptions(ScaledOptions):
    """How weights are updated, in the shared training loop."""

    optimizer: Literal["adamw", "sgd", "lars", "lamb"] = "adamw"  # type: ignore[assignment]
    """lars, lamb: SGD with momentum, and AdamW, whose step of each tensor is in proportion to the tensor's norm: for
    large batches, and large rates."""
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

    def make(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> torch.optim.Optimizer:
        return self._make(parameters, lr)

    def _make(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float | None,
        weight_decay: float | None = None,
        decayed: str | None = None,
        betas: tuple[float, float] | None = None,
    ) -> torch.optim.Optimizer:
        rate = self.lr if lr is None else lr
        if self.optimizer in ("lars", "lamb"):
            return make_layerwise(self.optimizer, parameters, rate, weight_decay, decayed, betas)
        return make_optimizer(self.optimizer, parameters, rate, weight_decay, decayed or "all", betas)


@dataclass(frozen=True, kw_only=True)
class ScheduledOptions(ClippedOptions):
    """How weights are updated, along a schedule of the learning rate."""

    warmup: int = 0
    """Steps over which the learning rate rises; then --lr_schedule."""
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up. cosine: falls as half a cosine. wsd: stays, and falls in a line over --decay steps."""
    min_lr: float = 0.0
    """The learning rate that it falls to."""
    decay: int | None = None
    """With --lr_schedule wsd, the last steps, over which the learning rate falls. Default: a fifth of the run."""
    betas: tuple[float, float] | None = None
    """How much of the means of gradients and of their squares AdamW and LAMB keep a step. Default: 0.9 0.999."""
    weight_decay: float | None = None
    """Part of a weight that a step takes off, times the learning rate. Default: 0.01, as PyTorch's AdamW has it; of
    lars 0.0005."""
    decayed: Literal["all", "matrices"] | None = None
    """What that is taken off. matrices: not off norms and biases, which have one dim. Default: all; of lars and lamb
    matrices."""

    def check(self) -> None:
        super().check()
        check_counts(0, warmup=self.warmup, decay=self.decay)
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight_decay {self.weight_decay}: it must be a number from 0 on, and finite")
        if not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"--min_lr {self.min_lr}: it must be from 0 to --lr {self.lr}")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"--betas {self.betas[0]} {self.betas[1]}: both must be at least 0, and below 1")
        if self.betas is not None and self.optimizer in ("sgd", "lars"):
            given = f"--betas {self.betas[0]} {self.betas[1]} with --optimizer {self.optimizer}"
            raise ConfigError(f"{given}, which has none: leave it out")
        for name, value in (("weight_decay", self.weight_decay), ("decayed", self.decayed)):
            if self.optimizer == "sgd" and value not in (None, "all"):
                raise ConfigError(f"--{name} {value} with --optimizer sgd, which has no weight decay: leave it out")
        wsd = "--lr_schedule wsd"
        check_effect(self.lr_schedule == "wsd", wsd, "the learning rate falls all along", wsd, decay=self.decay)

    def make(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> torch.optim.Optimizer:
        return self._make(parameters, lr, self.weight_decay, self.decayed, self.betas)


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """What is computed again, or compiled."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in backward instead of keeping them."""
    compile: bool = False
    """torch.compile what is known to give right gradients on this layout."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(RecomputeOptions):
    """What is computed in pieces or again, compiled, or kept on the host."""

    loss_chunks: int | None = None
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist. Default: 1, or as many
    as keep them small where they would have more than 1 GB on a rank."""
    offload: bool = False
    """Keep a rank's part of parameters, gradients and optimizer state in the host's memory, and update it there.
    --offload host is the same."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What the run saves, and what it goes on from."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints, checkpoints/step-N of the run's folder; one more at the end. Default: none."""
    keep: int | None = None
    """With --checkpoint_every, how many of the newest stay. Default: 2."""
    checkpoint_mode: Literal["async", "blocking"] | None = None
    """With --checkpoint_every. async: training goes on while a checkpoint is written, so a kill may go back to the one
    before that. blocking: training waits, and a kill loses at most one interval. Default: async."""
    resume: Path | None = None
    """Go on from a checkpoint, on any layout: a run's folder, one of its checkpoints/step-N, or auto: the newest whole
    one in --outdir, in the same record; from the beginning where there is none yet."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        check_counts(checkpoint_every=self.checkpoint_every, keep=self.keep)
        check_effect(
            self.checkpoint_every is not None,
            "--checkpoint_every",
            "nothing is saved",
            "--checkpoint_every 100",
            keep=self.keep,
            checkpoint_mode=self.checkpoint_mode,
        )


@dataclass(frozen=True, kw_only=True)
class TrainerCheckpoint(CheckpointOptions):
    """What the run saves, and what it goes on from."""

    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""


def check_resume(checkpoint: CheckpointOptions, run: BaseOptions) -> None:
    """--resume beside --overwrite and --outdir. Raises ConfigError where they contradict each other."""
    if checkpoint.resume is not None and run.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: leave one out")
    if checkpoint.resume == Path("auto") and run.outdir is None:
        raise ConfigError("--resume auto without --outdir: each run then has a folder of its own; give --outdir")
