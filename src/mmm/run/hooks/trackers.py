"""--tracker: sends a run's rows to the place where others look for them."""

from __future__ import annotations

from mmm.history.record.trackers import Tracked, check_tracker
from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime.ranks import command_line


class Trackers(Hook):
    """Hands rows to a tracker. It comes after the hooks that add to rows."""

    def __init__(self) -> None:
        self.tracked: Tracked | None = None

    def before(self, run: Run) -> None:
        check_tracker(run.options.tracker)

    def start(self, run: Run) -> None:
        # Rank 0 has the folder, and is the only one to send.
        tracker = run.options.tracker
        if run.outdir is not None and tracker is not None:
            config = {}
            if run.options.name is not None:
                config["name"] = run.options.name
            config["command"] = command_line()
            config["layout"] = str(run.layout)
            self.tracked = Tracked(tracker, run.outdir, config)

    def row(self, run: Run, row: Row) -> None:
        if self.tracked is not None:
            # Trackers take one number for each name: that of rank 0.
            of_rank_0 = {name: float(seconds[0]) for name, seconds in row.per_rank.items()}
            self.tracked.row({**row.values, **of_rank_0})

    def end(self, run: Run, error: BaseException | None) -> None:
        if self.tracked is not None:
            self.tracked.close(error)
