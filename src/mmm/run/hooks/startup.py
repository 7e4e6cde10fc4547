"""Where the start-up time of every rank went, in the record and in the log (`mmm.runtime.startup`)."""

from __future__ import annotations

import socket
import time

from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime import startup


class StartUp(Hook):
    """Times the start-up, up to the end of the first step.

    Attributes:
        times: this rank's times, until they are on record.
        table: text for the end of the log, on rank 0.
    """

    def __init__(self) -> None:
        self.times: startup.Times | None = None
        self.table = ""
        self._has_rows = False

    def before(self, run: Run) -> None:
        self.times = startup.ready()

    def start(self, run: Run) -> None:
        assert self.times is not None
        # After the first collective every rank is known to be there.
        run.comm.gather(None)
        self.times.group = time.time()

    def row(self, run: Run, row: Row) -> None:
        self._has_rows = True
        self._record(run)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            # A program without steps has not recorded them yet.
            self._record(run)
            if self.table and self._has_rows:
                run.log.info("%s", self.table)

    def _record(self, run: Run) -> None:
        """Put the times on record, once, when the first step is over. A collective."""
        times = self.times
        if times is None:
            return
        self.times = None
        if run.clock.first_start is not None and run.clock.first_end is not None:
            times.model = run.clock.first_start
            times.first_step = run.clock.first_end
        own = (times.marks(), times.imports, socket.gethostname())
        by_rank = run.comm.gather(own)
        # Only rank 0 has the list.
        if by_rank:
            marks, imports, hosts = zip(*by_rank, strict=True)
            record = startup.as_record(times.source, marks, imports)
            run.describe(startup=record)
            self.table = startup.table(record, hosts)
