"""A rank's tensors, copied to the host into memory that every save uses again.

DCP's own stager allocates anew each time, and copies a DTensor that is on the host twice. Memory that is new costs the
system a fault a page, which is more than the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.torch_private.groups import dtensor_like
from mmm.torch_private.module import foreach_copy_

PINNED = ("cuda", "xpu")  # devices that copy to pinned memory while the host goes on


class HostCopy:
    """Of a state with one structure; memory for it is kept from the first copy on."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy that stays as it is until the next is made. state: nested mappings of plain or DTensors."""
        found = dict(_leaves(state))
        self._made = {path: self._room(path, tensor) for path, tensor in found.items()}
        sources = [_local(tensor) for tensor in found.values()]
        foreach_copy_([_local(tensor) for tensor in self._made.values()], sources, non_blocking=True)
        for kind in {source.device.type for source in sources} & set(PINNED):
            getattr(torch, kind).synchronize()
        copied: dict[str, Any] = {name: {} for name in state}
        for (*names, last), tensor in self._made.items():
            at = copied
            for name in names:
                at = at.setdefault(name, {})
            at[last] = tensor
        return copied

    def _room(self, path: tuple[str, ...], tensor: Tensor) -> Tensor:
        made, local = self._made.get(path), _local(tensor)
        if made is not None and isinstance(made, DTensor) == isinstance(tensor, DTensor):
            there = _local(made)
            if there.shape == local.shape and there.dtype == local.dtype:
                return made
        room = torch.empty_like(local, device="cpu", pin_memory=local.device.type in PINNED)
        # Not by `from_local`, which would copy to the mesh's device.
        return dtensor_like(room, tensor) if isinstance(tensor, DTensor) else room


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _leaves(state: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield (*at, name), value
        else:
            yield from _leaves(value, (*at, name))
