"""Programs by their command lines, on ranks of the pool: all that they print, and their exit code. What `launch` adds,
a process that imports PyTorch and others that are forked from it, takes seconds, and has tests of its own."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from subprocess import CompletedProcess
from unittest.mock import patch

from mmm.run.comm import talking_through
from mmm.runtime.ranks import Rank
from mmm_launch.contract import DEVICE_VARIABLE
from support.clock import PATIENCE
from support.pool import MEASURED, PoolComm


def run_program(
    run_on_ranks: Callable[..., list], ranks: int, module: str, *arguments: object
) -> CompletedProcess[str]:
    """As ``launch -n RANKS --device cpu python3 -m MODULE WORDS…`` would end, if all ranks end alike."""
    by_rank = run_on_ranks(main_of, ranks, module, [*map(str, arguments)], timeout=PATIENCE)
    codes, outs, errs = zip(*by_rank, strict=True)
    assert len(set(codes)) == 1, errs
    return CompletedProcess([module, *arguments], codes[0], "".join(outs), "".join(errs))


def main_of(rank: Rank, module: str, arguments: Sequence[str]) -> tuple[int, str, str]:
    """On a rank: run the module's file, as Python's ``-m`` does."""
    # What launch tells a rank.
    place = {
        "RANK": rank.rank,
        "WORLD_SIZE": rank.world_size,
        "LOCAL_RANK": rank.rank,
        "LOCAL_WORLD_SIZE": rank.world_size,
        "MASTER_ADDR": rank.address,
        "MASTER_PORT": rank.port,
        DEVICE_VARIABLE: "cpu",
    }
    out, err = StringIO(), StringIO()
    code = 0
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {name: str(value) for name, value in place.items()}))
        stack.enter_context(talking_through(PoolComm()))
        stack.enter_context(patch("mmm.run.hooks.utilization.SIZE", MEASURED))
        stack.enter_context(patch.object(sys, "argv", [module, *arguments]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            runpy.run_path(find_spec(module).origin, run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code, out.getvalue(), err.getvalue()
