"""Where a run's start-up went, of every rank, in its record and in its log (`mmm.runtime.startup`)."""

from __future__ import annotations

import socket
import time

from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime import startup


class StartUp(Hook):
    """Times the start-up, up to the end of the first step."""

    def __init__(self) -> None:
        self.times: startup.Times | None = None  # until they are on record
        self.table = ""  # on rank 0, of a run with rows
        self._rows = 0

    def before(self, run: Run) -> None:
        self.times = startup.ready()

    def start(self, run: Run) -> None:
        assert self.times is not None
        run.comm.gather(None)  # every rank has answered
        self.times.group = time.time()

    def row(self, run: Run, row: Row) -> None:
        self._rows += 1
        self._record(run)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            self._record(run)  # of a program that has no steps
            if self.table and self._rows:
                run.log.info("%s", self.table)

    def _record(self, run: Run) -> None:
        """Put it on record, once, when the first step is over. A collective."""
        if self.times is None:
            return
        times, self.times = self.times, None
        if run.clock.first_start is not None and run.clock.first_end is not None:
            times.model, times.first_step = run.clock.first_start, run.clock.first_end
        if everyone := run.comm.gather((times.marks(), times.imports, socket.gethostname())):
            marks, imports, hosts = zip(*everyone, strict=True)
            record = startup.as_record(times.source, marks, imports)
            run.describe(startup=record)
            self.table = startup.table(record, hosts)
