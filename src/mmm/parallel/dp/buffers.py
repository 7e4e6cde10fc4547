"""Buffers under FSDP's mixed precision: forward reads them in the dtype of compute, as it does parameters.

FSDP casts parameters and inputs, and leaves buffers wide: `x - self.mean` is then wide as well, and the next matrix
product fails. Each module casts its own just for its forward (in one that is recomputed too); what is saved is wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmm.errors import ConfigError
from mmm.nn.experts import MixtureOfExperts
from mmm.torch_private.module import BatchNorm, own_buffers, version_of

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
