"""For programs that make a process group of their own, on ranks of the pool, which have one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from typing import Any
from unittest.mock import patch

from torch.distributed.distributed_c10d import _get_default_store

from mmm.run.comm import TorchComm, talking_through
from mmm.run.run import Run
from mmm.runtime.ranks import Rank

# Rows of the product that tells a run what its CPU can do at most.
MEASURED = 64

# The modules that may ask which rank they are on.
ASK = (
    "mmm.run.run",
    "mmm.trainer.cnn",
    "mmm.trainer.lm",
    "mmm.trainer.vit",
    "mmm.examples._support.text",
    "mmm.examples.fsdp",
    "mmm.examples.moe",
)


class PoolComm(TorchComm):
    """Talks by the process group of the pool, in place of one of the program's own."""

    def group(self, run: Run, meet: Callable[[Any], object]) -> AbstractContextManager[None]:
        meet(_get_default_store())
        return nullcontext()


@contextmanager
def program_on(rank: Rank) -> Iterator[None]:
    """A trainer or an example that is called inside runs on this rank of the pool, and prints nothing."""
    with ExitStack() as stack:
        stack.enter_context(talking_through(PoolComm()))
        stack.enter_context(patch("mmm.run.hooks.utilization.SIZE", MEASURED))
        for name in ASK:
            if hasattr(sys.modules.get(name), "whoami"):
                stack.enter_context(patch(f"{name}.whoami", lambda: rank))
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
