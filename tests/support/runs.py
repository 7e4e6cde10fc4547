"""A run without `start_run`: for tests that have a process group already, and want no folder."""

from __future__ import annotations

from pathlib import Path

import torch

from mmm.layout import Layout
from mmm.run.comm import TorchComm
from mmm.run.folder import Folder
from mmm.run.run import Run
from mmm.runtime import log
from mmm.runtime.clock import StepClock

CPU = torch.device("cpu")


class Rows(Folder):
    """Stands where a run's folder stands: keeps rows and notes, and writes nothing."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.notes = []
        # As on rank 0, which alone has rows: here every rank has.
        self.path = Path("no folder")

    def state(self, run):
        pass

    def row(self, run, row):
        if row.values:
            self.kept.append(row.values)

    def describe(self, run):
        self.notes = run.facts["notes"]


def make_run(rank, options, job, precision, device=CPU, clock=None, hooks=()):
    """A run, and what it keeps.

    Args:
        job: or a layout.
    """
    rows = Rows()
    layout = job if isinstance(job, Layout) else job.layout
    job = None if isinstance(job, Layout) else job
    flags = getattr(options, "run", options)
    comm = TorchComm()
    comm.rank = rank
    clock = StepClock(device) if clock is None else clock
    # As where a run begins.
    log._logged_once.clear()
    run = Run("test", options, flags, job, rank, layout, device, precision, comm, clock, [*hooks, rows], rows)
    return run, rows
