"""For programs that make a process group of their own, on ranks of the pool, which have one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from mmm.runtime.ranks import Rank


def meeting_only(rank: Rank, device: torch.device, timeout: float, meet: Callable[[Any], None]) -> Any:
    """In place of a process group of the program's own: the one there is."""
    meet(_get_default_store())
    return contextlib.nullcontext()
