"""Buffers in forward: in which dtype they are read, and which may be written.

Under FSDP's mixed precision they have the dtype of compute there, as parameters do. FSDP casts parameters and inputs,
and leaves buffers wide: `x - self.mean` is then wide as well, and the next matrix product fails. Each module casts its
own just for its forward (in one that is recomputed too); what is saved is wide.

What forward writes, such as a running mean of a model's own, each rank would write as its samples say. The first time
that forward writes a buffer in training, the ranks compare it. What is the same on all of them (a counter, what a
spectral norm keeps) may be written; what differs is refused by its name. What a checkpoint does not have, such as a
table for the length of a sequence, is passed over.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.models.draw import canonical_name
from mmm.models.experts import MixtureOfExperts
from mmm.parallel.local import to_local
from mmm.torch_private.module import BatchNorm, own_buffers, unsaved_buffers, version_of

WIDE = (BatchNorm, MixtureOfExperts)  # add up in them, and cast for themselves


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Have forward find the floating-point buffers of `model` in `dtype`, in place. Complex ones and integers stay."""
    for path, module in model.named_modules():
        if own_buffers(module) and not isinstance(module, WIDE):
            module.forward = _with_cast(module, module.forward, path, dtype)  # type: ignore[method-assign]


def _with_cast(module: nn.Module, forward: Callable[..., Any], path: str, dtype: torch.dtype) -> Callable[..., Any]:
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        named = ((name, buffer) for name, buffer in own_buffers(module).items() if buffer is not None)
        wide = {name: buffer for name, buffer in named if buffer.is_floating_point() and buffer.dtype != dtype}
        narrow = {name: buffer.to(dtype) for name, buffer in wide.items()}
        versions = {name: version_of(buffer) for name, buffer in narrow.items()}
        own_buffers(module).update(narrow)
        try:
            output = forward(*args, **kwargs)
            for name, buffer in narrow.items():
                if own_buffers(module).get(name) is not buffer or version_of(buffer) != versions[name]:
                    raise ConfigError(
                        f"forward writes the buffer {f'{path}.{name}' if path else name}, which it has in "
                        f"{str(dtype).removeprefix('torch.')} there, too coarse to add up in: write it after the "
                        f"step, or use dtype fp32"
                    )
        finally:
            own_buffers(module).update(wide)
        return output

    return cast_forward


class WrittenBuffers:
    """Hooks of a model whose ranks have different samples.

    Attributes:
        same: the names of buffers that the ranks have written alike.
    """

    def __init__(self, model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
        """
        Args:
            groups: of the axes along which ranks have different samples, with more than one rank.
        """
        self.model, self.groups = model, groups
        self.same: set[str] = set()
        self._before: dict[str, tuple[Tensor, int]] = {}
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._end())

    def _buffers(self) -> dict[str, Tensor]:
        """Those that are saved, but for BatchNorm's, which are of the global batch."""
        return {
            f"{path}.{name}" if path else name: buffer
            for path, module in self.model.named_modules()
            if not isinstance(module, BatchNorm)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in unsaved_buffers(module)
        }

    def _start(self) -> None:
        self._before = {}
        if self.model.training:
            self._before = {name: (buffer, version_of(buffer)) for name, buffer in self._buffers().items()}

    def _end(self) -> None:
        if not self.model.training:
            return
        written = {name: b for name, b in self._buffers().items() if not _unchanged(self._before.get(name), b)}
        self._before = {}
        if written := {name: buffer for name, buffer in written.items() if name not in self.same}:
            self._compare(written)

    @torch.no_grad()
    def _compare(self, written: dict[str, Tensor]) -> None:
        everyone: list[Any] = [{name: _digest(buffer) for name, buffer in written.items()}]
        for group in self.groups:
            gathered: list = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, everyone, group=group)
            everyone = [digests for part in gathered for digests in part]
        names = {name for digests in everyone for name in digests}
        if wrong := sorted(name for name in names if len({digests.get(name) for digests in everyone}) > 1):
            raise ConfigError(
                f"forward writes the buffer {canonical_name(wrong[0])}, other values on other ranks: each rank would "
                f"keep the statistics of its own samples; give forward the sum over the data-parallel ranks "
                f"(torch.distributed.all_reduce), or write the buffer after the step, from what they have together",
                on_every_rank=True,
            )
        self.same |= names


def _unchanged(before: tuple[Tensor, int] | None, buffer: Tensor) -> bool:
    return before is not None and before[0] is buffer and before[1] == version_of(buffer)


def _digest(buffer: Tensor) -> tuple[Any, ...]:
    local = to_local(buffer.detach()).contiguous().cpu()
    return tuple(local.shape), str(local.dtype), zlib.crc32(local.flatten().view(torch.uint8).numpy().tobytes())
