"""Private names of PyTorch for the fork server, which imports torch where its program does, and not before."""

from __future__ import annotations

from typing import Any

# What torch imports at the first use of a DTensor, FSDP2 or an optimizer, and each rank would otherwise pay for.
# Private: torch._dynamo, torch.distributed._composable, seen in 2.10 to 2.14; instead: nothing.
TORCH_LATER = ("torch._dynamo",)
TORCH_LATER_FOR = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._composable")


def is_in_bad_fork(device_module: Any) -> bool:
    """Whether ``torch.cuda`` or ``torch.xpu`` says, in a forked process, that a device was touched before the fork.

    Private: torch.cuda._is_in_bad_fork, torch.xpu._is_in_bad_fork, seen in 2.10 to 2.14; instead: nothing."""
    return getattr(device_module, "_is_in_bad_fork", bool)()
