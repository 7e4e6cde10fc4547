"""--tracker: a run's rows where others look for them, beside the record (`mmm.history.trackers`)."""

from __future__ import annotations

from mmm.history.trackers import Tracked
from mmm.runtime.ranks import command_line
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.rows import Row


class Trackers(Hook):
    """It stands after the record, into whose folder most trackers write."""

    def __init__(self, tracker: str | None, project: str | None = None) -> None:
        self.tracker, self.project = tracker, project
        self.tracked: Tracked | None = None

    def start(self, run: Run) -> None:
        if run.outdir is not None:
            named = {} if run.options.name is None else {"name": run.options.name}
            config = named | {"command": command_line(), "layout": str(run.layout)}
            self.tracked = Tracked(self.tracker, run.outdir, config, self.project)

    def row(self, run: Run, row: Row) -> None:
        if self.tracked is not None:
            of_rank_0 = {name: float(values[0]) for name, values in row.per_rank.items()}
            self.tracked.row({**row.numbers, **of_rank_0})

    def end(self, run: Run, error: BaseException | None) -> None:
        if self.tracked is not None:
            self.tracked.close()
