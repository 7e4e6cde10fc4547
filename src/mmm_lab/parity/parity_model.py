"""What the proof needs of a model. The reference imports this file, which therefore imports nothing of parallel/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# (samples, generator) → inputs, targets, and what else there is to a batch.
MakeBatch = Callable[[int, torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class ParityModel:
    """A model, how it is sharded, and what it is tried on.

    Attributes:
        model: makes a small model, always of the same sizes. It is plain PyTorch and knows no mesh.
        plan: makes its `mmm.parallel.Plan`.
        batch: (samples, generator) → inputs and targets, from the generator only; samples lie along dim 0.
        loss: (output, targets) → the sum of the losses over the targets. The proof divides it by the number of
            elements of the global batch's targets. None: cross-entropy.
        documents: as `batch`, for packed cases: with `PADDING` where a token has no target, and as a third tensor
            where each token's document begins, (batch, seq) int64, of which the model's forward gets
            `mmm.nn.attention.Documents`.
        chats: as `batch`, for cases of chats: with `PADDING` for each token that is not part of an answer.
        before_step: changes the model on one device before each step, by what the step before has counted, as
            `ParallelModel.balance_experts` does on a mesh.
        least_microbatches: micro-batches of a step without a pipeline, where the layout leaves a rank so many samples.
            With 2, a loss that is wrong by their number shows.
    """

    model: Callable[[], nn.Module]
    plan: Callable[[], Any]
    batch: MakeBatch
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    documents: MakeBatch | None = None
    chats: MakeBatch | None = None
    before_step: Callable[[nn.Module], None] | None = None
    least_microbatches: int = 2

    def mean_loss(self, output: Tensor, targets: Tensor, count: int | Tensor) -> Tensor:
        """Returns `loss`, or cross-entropy, over the `count` targets of a global batch."""
        if self.loss is not None:
            return self.loss(output, targets) / count
        # (batch, …, classes) and (batch, …) become (elements, classes) and (elements,).
        logits = output.flatten(0, -2)
        total = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / count
