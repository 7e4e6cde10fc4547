"""Ends the run when a collective times out, with a message that says which ranks did not reach it."""

from __future__ import annotations

from mmm.run.hook import Hook
from mmm.run.run import Run
from mmm.runtime.hang import HangWatch


class Hang(Hook):
    def __init__(self) -> None:
        self.watch: HangWatch | None = None

    def start(self, run: Run) -> None:
        # A dry run has no other ranks to wait for.
        if not run.comm.dry:
            self.watch = HangWatch(run.rank, run.options.timeout, run.clock)
            self.watch.__enter__()

    def end(self, run: Run, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.__exit__(type(error), error, None)
