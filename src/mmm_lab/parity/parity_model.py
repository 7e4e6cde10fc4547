"""What the proof needs of a model. The reference imports this file, which therefore imports nothing of parallel/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ParityModel:
    """A model, how it is sharded, and what it is tried on.

    Attributes:
        model: makes a small one, plain PyTorch that knows nothing of meshes, and always of the same sizes.
        plan: makes the `mmm.parallel.Plan` of it.
        batch: (samples, generator) → inputs and targets, made up from the generator alone; samples lie along dim 0.
        loss: (output, targets) → its sum over them; the proof divides it by the elements of the targets of the global
            batch. None: cross-entropy.
        documents: as `batch`, for ``--data packed``: with `PADDING` where a token has no target, and as a third tensor
            ``document_starts``, (batch, seq).
        chats: as `batch`, for ``--data chats``: with `PADDING` for each token that is of no answer.
        after_step: changes the model after the optimizer's step, on one device, as a step on a mesh does.
        least_microbatches: of a step without a pipeline, where the layout leaves so many samples to a rank. 2, so that
            a loss which is wrong by their number shows.
    """

    model: Callable[[], nn.Module]
    plan: Callable[[], Any]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    documents: Callable[[int, torch.Generator], tuple[Tensor, Tensor, Tensor]] | None = None
    chats: Callable[[int, torch.Generator], tuple[Tensor, Tensor]] | None = None
    after_step: Callable[[nn.Module], None] | None = None
    least_microbatches: int = 2

    def mean_loss(self, output: Tensor, targets: Tensor, count: int | Tensor) -> Tensor:
        """`loss`, or cross-entropy, over the `count` targets of a global batch."""
        if self.loss is not None:
            return self.loss(output, targets) / count
        return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum") / count
