"""Where a run's start-up went, of every rank, in its record and in its log (`mmm.runtime.startup`); and at its end what
the whole run took."""

from __future__ import annotations

import socket
import time

from mmm.runtime import startup
from mmm.runtime.process_group import gather_floats, gather_objects
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.rows import Row


class StartUp(Hook):
    """Times the start-up, up to the end of the first step, and the run."""

    def __init__(self) -> None:
        self.times: startup.Times | None = None  # until they are on record
        self.table = ""  # on rank 0, of a run with rows
        self._rows = 0
        self._started = 0.0  # in seconds since 1970
        self._since = ""

    def before(self, run: Run) -> None:
        self.times = startup.ready()
        self._started, self._since = self.times.started, startup.since(self.times.source)

    def start(self, run: Run) -> None:
        assert self.times is not None
        gather_objects(run.rank, None)  # every rank has answered
        self.times.group = time.time()

    def row(self, run: Run, row: Row) -> None:
        self._rows += 1
        self._record(run)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            self._record(run)  # of a program that has no steps
            if self.table and self._rows:
                run.log.info("%s", self.table)
            self._record_cost(run)

    def _record(self, run: Run) -> None:
        """Put it on record, once, when the first step is over. A collective."""
        if self.times is None:
            return
        times, self.times = self.times, None
        if run.clock.first_start is not None and run.clock.first_end is not None:
            times.model, times.first_step = run.clock.first_start, run.clock.first_end
        if everyone := gather_objects(run.rank, (times.marks(), times.imports, socket.gethostname())):
            marks, imports, hosts = zip(*everyone, strict=True)
            record = startup.as_record(times.source, marks, imports)
            run.describe(startup=record)
            self.table = startup.table(record, hosts)

    def _record_cost(self, run: Run) -> None:
        """Seconds since the start, CPU seconds and resident memory of every rank. A collective."""
        cpu_seconds, resident = startup.process_cost()
        seconds, *cost = zip(
            *gather_floats([time.time() - self._started, cpu_seconds, float(resident)], run.device), strict=True
        )
        run.describe(cost={"seconds": max(seconds), "cpu_seconds": cost[0], "peak_resident_bytes": cost[1]})
        most = max(cost[1])
        run.log.info(
            "%.1f s from %s; %.1f CPU s of %d ranks; resident memory of a rank at most %.0f MiB%s",
            max(seconds),
            self._since,
            sum(cost[0]),
            len(seconds),
            most / 2**20,
            f" (rank {cost[1].index(most)})" if len(seconds) > 1 else "",
        )
