"""CPU offload: this rank's shards and their optimizer state live in the host's memory, and are updated there.

::

                 on the device                                  on the host
    fsdp         a unit's parameters, while they are gathered   shards of parameters, gradients and optimizer state
    zero1, 2     full parameters                                the same

A step brings the gradients of this rank's shards down, updates the shards on the host, and takes them up: zero1 and
zero2 once, fsdp whenever it gathers them. It saves 4 elements a parameter and rank under AdamW, and costs the link to
the host and an optimizer at the host's speed.

Gradients are then CPU tensors. What the ranks sum over them, such as a norm, goes by the device, because groups of
accelerators send nothing from the host. On a CPU nothing changes except that zero1 and zero2 keep a second copy of a
rank's shards.

Sources: Ren et al., "ZeRO-Offload", 2021; ``torch.distributed.fsdp.CPUOffloadPolicy``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError, config_field
from mmm.parallel.dp.fsdp import gathered_twice
from mmm.parallel.dp.wrapped import Wrapper
from mmm.parallel.local import to_local


def check_offload(data_parallel: str, dtype: str = "") -> None:
    """Raises ConfigError where a technique, or a precision, cannot be offloaded; needs no process group."""
    if data_parallel == "ddp":
        raise ConfigError(
            f"{config_field('offload')} "
            f"with {data_parallel}: every rank updates the full model, and PyTorch has nothing that keeps "
            f"DDP's state on the host; use zero1, zero2 or fsdp",
        )
    if dtype == "fp16":
        raise ConfigError(
            f"{config_field('offload')} with {config_field('dtype')} "
            "fp16: scaling gradients that lie on the host has not been shown to be "
            "right; use bf16 or fp32"
        )


def moved(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that offload keeps on the host of this rank, and moves in a step; after the optimizer's first step.

    Args:
        models: this rank's, one or its pipeline stages.

    Returns:
        ``host_parameters`` and ``host_state``: kept there. ``down``: gradients, device to host. ``up``: parameters,
        host to device; by fsdp for forward, and once more for backward what `gathered_twice` says.
    """
    parameter_bytes = gathered_again = 0
    for model in models:
        parameter_bytes += sum(to_local(p).nbytes for p in model.parameters())
        if not isinstance(model, Wrapper):
            gathered_again += sum(to_local(p).nbytes for p in gathered_twice(model))
    values = (value for of_one in optimizer.state.values() for value in of_one.values())
    state = sum(to_local(value).nbytes for value in values if isinstance(value, Tensor) and value.ndim)
    return {
        "host_parameters": parameter_bytes,
        "host_state": state,
        "down": parameter_bytes,
        "up": parameter_bytes + gathered_again,
    }


def moved_text(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """`moved`, in words; MB: 10⁶ bytes."""
    mb = {name: f"{value / 1e6:.2f} MB" for name, value in moved(models, optimizer).items()}
    text = (
        f"offload: on the host {mb['host_parameters']} of parameters and {mb['host_state']} of optimizer state; a "
        f"step moves {mb['down']} of gradients down and {mb['up']} of parameters up"
    )
    return text + (" (one memory: the device is the CPU)" if device.type == "cpu" else "")
