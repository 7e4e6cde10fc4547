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

from mmm.errors import ConfigError, config_field


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
