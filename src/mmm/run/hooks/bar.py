"""A bar on the terminal: how many steps are made, the loss, the time left, and how long the step under way lasts.

::

    12/120 steps ━━━━━━━━━━━━ loss 2.6133  left 6m  this step 14s  behind: rank 3

It is there only where ranks print to a terminal themselves. In files, jobs and notebooks a run prints its lines alone.
Lines go above the bar, and the bar is gone when the run ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from mmm.run.hook import Hook, Loop
from mmm.run.lines import shown
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.runtime.agreement import name_ranks
from mmm.runtime.hang import waits_for_others
from mmm.torch_private.groups import default_store
from mmm.units import duration

# A step of less than this many seconds needs no sign of life.
SHORT = 2.0
# From this many seconds on the ranks tell each other where they are.
LONG = 5.0
# Seconds between two looks at the step.
PAUSE = 1.0
WIDTH = 12
# In the store: where a rank is.
KEY = "mmm/bar"


class Bar(Hook):
    """The bar, on rank 0. Other ranks tell it through the store where they are in a step that takes long.

    Attributes:
        steps: number of steps of the loop. 0 before it begins.
        made: number of them that are made.
        loss: loss of the last row; None before the first.
        since: when the step under way began, by `time.monotonic`. None between steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.made = 0
        self.loss: float | None = None
        self.since: float | None = None
        # When the first step of the loop ended, and how many were made by then: the pace is that of the steps after.
        self._pace_from: tuple[float, int] | None = None
        self._live: Live | None = None
        self._over = threading.Event()
        self._store: Any = None

    def start(self, run: Run) -> None:
        # With all ranks' lines in the terminal there is no place for a bar.
        if run.comm.dry or run.options.log_all_ranks or not is_terminal():
            return
        self._rank = run.rank
        self._main = threading.get_ident()
        if run.rank.world_size > 1:
            # A connection of its own: the program may be inside a call to the other one.
            self._store = default_store().clone()
        if run.rank.is_main:
            self._live = Live(
                console=_Console(soft_wrap=True),
                get_renderable=self.line,
                refresh_per_second=1 / PAUSE,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        elif self._store is not None:
            threading.Thread(target=self._tell, name="mmm-bar", daemon=True).start()

    def loop(self, run: Run, loop: Loop) -> None:
        self.steps = loop.steps
        self.made = run.first
        self._pace_from = None

    def begin(self, run: Run, step: Step) -> None:
        self.since = time.monotonic()

    def row(self, run: Run, row: Row) -> None:
        self.loss = row.loss

    def finish(self, run: Run, step: Step) -> None:
        self.since = None
        self.made += 1
        # The first step includes warm-up.
        if self._pace_from is None:
            self._pace_from = (time.monotonic(), self.made)

    def end(self, run: Run, error: BaseException | None) -> None:
        self._over.set()
        # The last frame is empty.
        self.steps = 0
        if self._live is not None:
            self._live.stop()

    def line(self) -> Table:
        """The bar as it is now. Outside of loops it is empty."""
        grid = Table.grid(padding=(0, 1))
        if not self.steps:
            return grid
        lasts = self._lasts()
        facts = []
        if self.loss is not None:
            facts.append(f"loss {shown('loss', self.loss)}")
        left = self._left()
        if left is not None:
            facts.append(f"left {duration(left, short=True)}")
        if lasts > SHORT:
            facts.append(f"this step {duration(lasts, short=True)}")
        if lasts > LONG and self._store is not None:
            # Under another launcher the store may go before the run ends.
            with suppress(RuntimeError, OSError):
                behind = self._behind()
                if behind:
                    facts.append(f"behind: {name_ranks(behind)}")
        bar = ProgressBar(total=self.steps, completed=self.made, width=WIDTH)
        for _ in range(3):
            grid.add_column(no_wrap=True)
        grid.add_row(f"{self.made}/{self.steps} steps", bar, "  ".join(facts))
        return grid

    def _lasts(self) -> float:
        """Seconds since the step under way began. 0 between steps."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def _left(self) -> float | None:
        """Seconds that the rest of the loop takes at the pace of the steps after the first one. None: not known."""
        if self._pace_from is None:
            return None
        began, before = self._pace_from
        if not before < self.made < self.steps:
            return None
        until = self.since or time.monotonic()
        return (until - began) / (self.made - before) * (self.steps - self.made)

    def _tell(self) -> None:
        """Tell once a second where this rank is, while a step takes long. A thread of each rank but 0."""
        while not self._over.wait(PAUSE):
            if self._lasts() > LONG:
                place = json.dumps([time.time(), waits_for_others(self._main)])
                # The store goes with rank 0.
                with suppress(RuntimeError, OSError):
                    self._store.set(f"{KEY}/{self._rank.rank}", place)

    def _behind(self) -> list[int]:
        """The ranks that compute while others wait for them, as far as the ranks have told it just now."""
        waits = {self._rank.rank: waits_for_others(self._main)}
        for rank in range(self._rank.world_size):
            key = f"{KEY}/{rank}"
            if self._store.check([key]):
                told, its_waits = json.loads(self._store.get(key))
                if time.time() - told < 3 * PAUSE:
                    waits[rank] = its_waits
        if not any(waits.values()):
            return []
        return [rank for rank, its_waits in sorted(waits.items()) if not its_waits]


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class _Console(Console):
    """A console that leaves the cursor visible: a rank that is killed could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False
