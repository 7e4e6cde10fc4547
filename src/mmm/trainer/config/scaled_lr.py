"""A learning rate that grows with the batch: its flags, and what they come to for a run's global batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mmm.trainer.config.run import OptimizerOptions, check_counts, check_effect
from mmm.trainer.job import Job


@dataclass(frozen=True, kw_only=True)
class ScaledOptions(OptimizerOptions):
    """How weights are updated, with a learning rate that grows with the batch."""

    scale_lr: Literal["none", "sqrt", "linear"] = "none"
    """--lr is that of a base batch; of a global batch k times as large the rate is √k or k times that."""
    base_batch_size: int | None = None
    """With --scale_lr, the global batch that --lr is for. Default: what one data-parallel coordinate has where no flag
    says, so that the rate grows with their number."""

    def check(self) -> None:
        super().check()
        check_counts(base_batch_size=self.base_batch_size)
        scales = self.scale_lr != "none"
        check_effect(
            scales,
            "--scale_lr",
            "the learning rate is --lr",
            "--scale_lr linear",
            base_batch_size=self.base_batch_size,
        )

    def scaled(self, global_batch_size: int, default_base: int) -> tuple[float, tuple[str, ...]]:
        """The learning rate of a global batch, in samples, and a note of how it comes about.

        Sources: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (√k); Goyal et
        al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017 (k).
        """
        if self.scale_lr == "none":
            return self.lr, ()
        base = self.base_batch_size or default_base
        ratio = global_batch_size / base
        rate = self.lr * (ratio if self.scale_lr == "linear" else ratio**0.5)
        over = f"a global batch of {global_batch_size} over a base of {base}"
        return rate, (f"learning rate {rate:.4g}: --lr {self.lr:g} scaled by {over}, {self.scale_lr}",)


def with_scaled_lr(job: Job, options: ScaledOptions, default_base: int) -> Job:
    """The job with the learning rate that the flags ask for, of its global batch, and a note of how it comes about.

    Args:
        default_base: samples, where no flag says which global batch --lr is for.
    """
    lr, notes = options.scaled(job.global_batch_size, default_base)
    return replace(job, lr=lr, notes=(*job.notes, *notes))
