"""Dropout whose choice is a function of (seed, step, sample, element): the same on every mesh.

PyTorch's dropout draws from the rank's generator: ranks with other samples, or with other shards of the same
activations, then drop other elements than one device does. Here every sample has a key, which goes through forward with
it, and every element of an activation is drawn by its index (`mmm.nn.init.random_bits`).

Source: Srivastava et al., "Dropout", 2014.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.init import BITS, random_bits, stream_key

# Bits of an index for the elements of a sample's activation: there are at most 2⁴⁰. Those above count the layers.
_LAYER = 40


def sample_keys(
    seed: int,
    step: int,
    first_sample: int,
    size: int,
    device: torch.device | None = None,
) -> Tensor:
    """The keys of samples first_sample … first_sample + size - 1 of a step's global batch: (size,) int64."""
    samples = torch.arange(first_sample, first_sample + size, device=device)
    step_key = stream_key(seed, f"dropout/{step}")
    return random_bits(step_key, samples)


class Dropout(nn.Module):
    """While training, sets elements to 0 with probability `p`, and divides the others by 1 - p.

    Args:
        layer: which of the model's layers with dropout this is: each draws its own bits.

    Attributes:
        shard: which shard of a sample's elements is local to this rank, where tp shards them in equal pieces.
    """

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.shard = 0

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (batch, …). If it is sharded, then along the dim after batch.
            keys: `sample_keys`, (batch,). None: draw from the rank's generator, as PyTorch's dropout does.
            positions: places of the tokens in the sequence, if x is (batch, seq, dim) and cp shards the sequence:
                (seq,) int64; or (seq · tp,), of which tp shards those of x in turn.

        Returns:
            The shape of x.
        """
        if not self.training or self.p == 0:
            return x
        if keys is None:
            return F.dropout(x, self.p)
        if positions is None:
            # (elements,): the index of each element in the full activation of a sample.
            elements = x[0].numel()
            first = self.shard * elements
            index = torch.arange(elements, device=x.device) + first
        else:
            _, seq, dim = x.shape
            # (seq,): this rank's row of (tp, seq).
            own_positions = positions.unflatten(0, (-1, seq))[self.shard]
            channels = torch.arange(dim, device=x.device)
            # (seq, dim) → (elements,)
            index = (own_positions[:, None] * dim + channels).flatten()
        # (batch, elements)
        bits = random_bits(keys[:, None], index, first=self.layer << _LAYER)
        threshold = int(self.p * (1 << BITS))
        dropped = bits < threshold
        return x.masked_fill(dropped.view_as(x), 0) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def has_dropout(model: nn.Module) -> bool:
    """Whether a model's forward takes ``sample_keys``."""
    return any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())
