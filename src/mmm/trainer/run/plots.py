"""Pictures of a run's rows once it is over, and its loss in the terminal: by a process of its own."""

from __future__ import annotations

import subprocess
import sys

from mmm.trainer.config.run import StepOptions
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.row import Row

DRAW = "mmm.history.plots.draw"  # the module, which no run imports


def draws_plots(run: Run) -> bool:
    """Whether --plots says so; not of a program that has no such flag."""
    return isinstance(run.options, StepOptions) and run.options.plots


class Plots(Hook):
    """It stands after the record, which is complete by then."""

    def __init__(self) -> None:
        self._is_curve = False  # a record of the first row alone has none

    def row(self, run: Run, row: Row) -> None:
        self._is_curve |= any(row.at.values())

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and self._is_curve and run.outdir is not None and draws_plots(run):
            sys.stdout.flush()
            drawn = subprocess.run([sys.executable, "-m", DRAW, str(run.outdir)], check=False).returncode == 0
            if drawn:
                run.log.info("pictures: %s", run.outdir / "plots" / "mplot" / "pngs" / "summary.png")
