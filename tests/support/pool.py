"""For programs that make a process group of their own, on ranks of the pool, which have one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.distributed_c10d import _get_default_store

from mmm.runtime.ranks import Rank

MEASURED = 64  # rows of the product that tells a run what its CPU can do at most

# The modules that may ask which rank they are on.
ASK = (
    "mmm.trainer.run.core",
    "mmm.trainer.config.cnn",
    "mmm.trainer.config.data",
    "mmm.trainer.cnn",
    "mmm.trainer.lm",
    "mmm.trainer.vit",
    "mmm.trainer.config.resolve_text",
    "mmm.examples._support.text",
    "mmm.examples.fsdp",
    "mmm.examples.moe",
)


def meeting_only(rank: Rank, device: torch.device, timeout: float, meet: Callable[[Any], None]) -> Any:
    """In place of a process group of the program's own: the one there is."""
    meet(_get_default_store())
    return nullcontext()


@contextmanager
def program_on(rank: Rank) -> Iterator[None]:
    """A trainer or an example that is called inside runs on this rank of the pool, and prints nothing."""
    with ExitStack() as stack:
        stack.enter_context(patch("mmm.trainer.run.core.process_group", meeting_only))
        stack.enter_context(patch("mmm.trainer.run.utilization.SIZE", MEASURED))
        for name in ASK:
            if hasattr(sys.modules.get(name), "whoami"):
                stack.enter_context(patch(f"{name}.whoami", lambda: rank))
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
