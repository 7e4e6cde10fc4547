"""The line that goes on from what a run has left."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmm.contract import LINE_VARIABLE
from mmm.runtime.ranks import command_line

NOT_AGAIN = ("resume", "outdir", "overwrite", "max_iters", "epochs")  # flags that the line that goes on has anew


def line_that_goes_on(outdir: Path, options: Any, steps: int) -> str:
    """The command that makes as many steps again, from the newest checkpoint, in the same record."""
    typed = shlex.split(os.environ.get(LINE_VARIABLE, "")) or command_line()
    epochs = getattr(options, "epochs", None)
    more: list[str] = []
    if epochs is not None and getattr(options, "max_iters", None) is None:
        more = ["--epochs", str(2 * epochs)]
    elif hasattr(options, "max_iters"):
        more = ["--max_iters", str(2 * steps)]
    return shlex.join([*without(typed, NOT_AGAIN), "--outdir", str(outdir), "--resume", "auto", *more])


def without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """A command line without some flags, and without their values."""
    kept: list[str] = []
    dropped = False
    for word in words:
        flag = word.startswith("--")
        name = word[2:].partition("=")[0].replace("-", "_") if flag else ""
        if flag:
            dropped = name in names
        if not dropped:
            kept.append(word)
        elif not flag or "=" in word:
            dropped = False  # its value; what comes next is another's
    return kept


def below(path: Path) -> str:
    """A path, from the current folder if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
