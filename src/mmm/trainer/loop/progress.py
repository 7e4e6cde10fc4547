"""A progress bar on a terminal, on rank 0; nothing in a file or on other ranks. The log goes above it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mmm.runtime import contract
from mmm.runtime.contract import TERMINAL_VARIABLE
from mmm.runtime.log import log_through
from mmm.runtime.ranks import Rank

if TYPE_CHECKING:
    from rich.console import Console


def terminal(rank: Rank) -> Console | None:
    """Where rank 0 writes, if it is a terminal: its own standard output, or that of the `launch` which copies it."""
    if not rank.is_main or os.environ.get("TERM") == "dumb":
        return None
    from rich.console import Console

    if sys.stdout.isatty():
        return Console()
    if contract.attached() and (size := os.environ.get(TERMINAL_VARIABLE)):
        columns, lines = map(int, size.split("x"))
        return Console(force_terminal=True, width=columns, height=lines)
    return None


class StepsBar:
    """A bar over all steps, in a ``with`` block: steps of all, loss, tokens/s, time left. None without a terminal."""

    def __init__(self, rank: Rank) -> None:
        self.console, self._stack = terminal(rank), ExitStack()
        self._bar: Any = None

    def __enter__(self) -> StepsBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar = None
        self._stack.close()

    def over(self, steps: range) -> Iterator[int]:
        """The steps, each of which is done when the next is asked for."""
        if self.console is not None and len(steps):
            self._begin(self.console, steps)
        try:
            for step in steps:
                yield step
                if self._bar is not None:
                    self._bar.advance(self._bar.task_ids[0])
        finally:
            self.__exit__()

    def row(self, loss: float | None, rate: float) -> None:
        """A row was logged. rate: tokens, or samples, a second."""
        if self._bar is not None and loss is not None:
            self._bar.update(self._bar.task_ids[0], loss=f"loss {loss:.4f}", rate=f"{rate:,.0f}/s")

    def _begin(self, console: Console, steps: range) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        fields = (TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), *fields)
        self._bar = self._stack.enter_context(Progress(*columns, transient=True, console=console))
        self._bar.add_task("", total=steps.stop, completed=steps.start, loss="", rate="")

        def above(text: str) -> None:
            if line := text.rstrip("\n"):
                console.print(Text.from_ansi(line), soft_wrap=True)

        self._stack.enter_context(log_through(above))
