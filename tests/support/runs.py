"""A run without `start_run`: for tests that have a process group already, and want no folder."""

from __future__ import annotations

from pathlib import Path

import torch

from mmm.layout import Layout
from mmm.runtime import log
from mmm.runtime.clock import StepClock
from mmm.trainer.config.training import CheckpointOptions
from mmm.trainer.job import Job
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.resume import ResumableRecord

CPU = torch.device("cpu")


class Rows(Hook):
    """Stands where a record stands: keeps rows and notes."""

    def __init__(self):
        self.rows, self.notes = [], []

    def row(self, run, row):
        if row.numbers:
            self.rows.append(row.numbers)

    def describe(self, run, facts):
        self.notes += [facts["note"]] if "note" in facts else []


def make_run(rank, options, resolved, precision, device=CPU, clock=None, hooks=()):
    """A run, and what it keeps.

    Args:
        resolved: or a layout.
    """
    rows = Rows()
    hooks = [ResumableRecord(CheckpointOptions()), rows, *hooks]
    spec = Job(layout=resolved) if isinstance(resolved, Layout) else resolved
    clock = StepClock(device) if clock is None else clock
    outdir = Path("no folder")  # as of rank 0, which alone has rows: here every rank has
    log._said.clear()  # as where a run begins
    return Run("test", options, spec, rank, device, precision, clock, hooks, outdir), rows
