"""Buffers under FSDP's mixed precision: forward reads them in the dtype of compute, as it does parameters.

FSDP casts parameters and inputs, and leaves buffers wide: `x - self.mean` is then wide as well, and the next matrix
product fails. Here each module casts its own buffers for the length of its forward (a recomputed one too). Between
forwards they are wide, and so are those in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmm.errors import ConfigError
from mmm.nn.experts import MixtureOfExperts
from mmm.torch_private.module import BatchNorm, own_buffers, version_of

# These add up in their buffers, and cast by themselves what they read.
WIDE = (BatchNorm, MixtureOfExperts)


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Have forward find the floating-point buffers of `model` in `dtype`, in place. Complex ones and integers stay."""
    for path, module in model.named_modules():
        if own_buffers(module) and not isinstance(module, WIDE):
            module.forward = _with_cast(module, module.forward, path, dtype)  # type: ignore[method-assign]


def _with_cast(
    module: nn.Module,
    forward: Callable[..., Any],
    path: str,
    dtype: torch.dtype,
) -> Callable[..., Any]:
    """`forward`, with the buffers of `module` cast to `dtype` while it runs.

    Args:
        path: the module's name in the model, for an error.
    """

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        wide = {}
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                wide[name] = buffer
        narrow = {}
        versions = {}
        for name, buffer in wide.items():
            narrow[name] = buffer.to(dtype)
            versions[name] = version_of(narrow[name])
        own_buffers(module).update(narrow)
        try:
            output = forward(*args, **kwargs)
            # What forward writes to a copy would be lost.
            for name, buffer in narrow.items():
                is_replaced = own_buffers(module).get(name) is not buffer
                is_written = version_of(buffer) != versions[name]
                if is_replaced or is_written:
                    full_name = f"{path}.{name}" if path else name
                    dtype_name = str(dtype).removeprefix("torch.")
                    raise ConfigError(
                        f"forward writes the buffer {full_name}, which it has in {dtype_name} there, too coarse to add "
                        f"up in: write it after the step, or use dtype fp32"
                    )
        finally:
            own_buffers(module).update(wide)
        return output

    return cast_forward
