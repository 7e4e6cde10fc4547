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
        marks: this rank's marks, until they are on record.
        source: who says when the first mark was.
        table: text for the end of the log, on rank 0.
    """

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.source = ""
        self.table = ""
        self._has_rows = False

    def before(self, run: Run) -> None:
        self.marks, self.source = startup.ready()

    def start(self, run: Run) -> None:
        # After the first collective every rank is known to be there.
        run.comm.gather(None)
        self.marks["group"] = time.time()

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
        """Put the marks on record, once, when the first step is over. A collective."""
        if not self.marks:
            return
        if run.clock.first_start is not None and run.clock.first_end is not None:
            self.marks["model"] = run.clock.first_start
            self.marks["first_step"] = run.clock.first_end
        by_rank = run.comm.gather((self.marks, socket.gethostname()))
        self.marks = {}
        # Only rank 0 has the list.
        if by_rank:
            marks, hosts = zip(*by_rank, strict=True)
            record = startup.as_record(self.source, marks)
            run.describe(startup=record)
            self.table = startup.table(record, hosts)
