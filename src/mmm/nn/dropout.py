"""Dropout whose choice is a function of (seed, step, sample, element): the same on every mesh.

PyTorch's draws from the rank's generator: ranks with other samples, or with other parts of the same activations, then
drop other elements than one device does. Here every sample has a key, which goes through forward with it, and every
element of an activation is drawn by its number (`mmm.nn.draw.random_bits`).

Source: Srivastava et al., "Dropout", 2014.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.draw import BITS, random_bits, stream_key

_LAYER = 40  # bits: elements of a sample's activation, at most 2⁴⁰


def sample_keys(seed: int, step: int, first_sample: int, size: int, device: torch.device | None = None) -> Tensor:
    """The keys of samples first_sample … first_sample + size - 1 of a step's global batch: (size,) int64."""
    sample = torch.arange(first_sample, first_sample + size, device=device)
    return random_bits(stream_key(seed, f"dropout/{step}"), sample)


class Dropout(nn.Module):
    """While training, sets elements to 0 with probability `p`, and divides the others by 1 - p.

    Args:
        layer: which of the model's layers with dropout this is: each draws its own numbers.

    Attributes:
        shard: which shard of a sample's elements is local to this rank, where tensor parallel shards it in equal parts.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p, self.layer, self.shard = p, layer, 0

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (batch, …); sharded, the first of the other dims is.
            keys: `sample_keys`, (batch,); None: drawn from the rank's generator, as PyTorch's dropout is.
            positions: of the tokens in the sequence, where x is (batch, seq, dim) and cp shards the sequence: (seq,)
                int64; or (seq · tp,), of which tp shards x's in turn.
        """
        if not self.training or self.p == 0:
            return x
        if keys is None:
            return F.dropout(x, self.p)
        if positions is None:
            elements = x[0].numel()
            element = torch.arange(elements, device=x.device) + self.shard * elements
        else:
            own = positions.unflatten(0, (-1, x.shape[1]))[self.shard]
            element = (own[:, None] * x.shape[2] + torch.arange(x.shape[2], device=x.device)).flatten()
        bits = random_bits(keys[:, None], element, first=self.layer << _LAYER)  # (batch, elements)
        dropped = bits < int(self.p * (1 << BITS))
        return x.masked_fill(dropped.view_as(x), 0) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def has_dropout(model: nn.Module) -> bool:
    """Whether a model's forward takes ``sample_keys``."""
    return any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())
