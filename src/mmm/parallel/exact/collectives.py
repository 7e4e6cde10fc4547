"""The collectives of an exact run: they move bytes, and leave every sum to this rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.runtime import process_group


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of a group, by rank. A collective that moves bytes, of any dtype."""
    tensor = tensor.contiguous()
    # (ranks, …)
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    process_group.all_gather(_bytes_of(gathered), _bytes_of(tensor), group=group)
    return list(gathered.unbind())


def all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Send piece r to rank r, and receive one from each rank. A collective that moves bytes, of any dtype.

    Args:
        pieces: (ranks, …).
    """
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(_bytes_of(received), _bytes_of(pieces), group=group)
    return list(received.unbind())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, as bytes: a flat view."""
    # Backends take bytes where they do not know a dtype, and move them unchanged.
    return tensor.view(-1).view(torch.uint8)
