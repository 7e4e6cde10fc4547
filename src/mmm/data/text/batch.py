"""A rank's tokens of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A local batch.

    Attributes:
        inputs, targets: (batch, seq) int64; a target is the token after its input, or `PADDING`.
        count: targets in the global batch: the divisor of a sum of losses.
        has_padding: some targets may be `PADDING`, which `count` includes: the divisor is how many are not, and differs
            from step to step.
        document_starts: (batch, seq) int64, the place in its sequence where the document of each token begins; None
            where a sequence is one text.
        sample_keys: (batch,) int64, for models with dropout (`mmm.models.dropout`); None where there are none.
    """

    inputs: Tensor
    targets: Tensor
    count: int
    has_padding: bool = False
    document_starts: Tensor | None = None
    sample_keys: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """On the device. The host does not wait for the copy to CUDA or XPU, which is made from pinned memory."""
        tensors = [self.inputs, self.targets, *([] if self.document_starts is None else [self.document_starts])]
        if pinned := device.type in ("cuda", "xpu"):
            tensors = [tensor.pin_memory() for tensor in tensors]
        inputs, targets, *starts = (tensor.to(device, non_blocking=pinned) for tensor in tensors)
        return Batch(inputs, targets, self.count, self.has_padding, *starts)
