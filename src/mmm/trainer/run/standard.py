"""The hooks that most programs have, in their order; and those that are a few lines around what another room has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

from mmm.history.record.trackers import Tracked
from mmm.layout import Layout
from mmm.parallel.footprint import STATE, Footprint, check_fits
from mmm.runtime.hang import HangWatch
from mmm.runtime.ranks import command_line
from mmm.trainer.config.profile import ProfileOptions
from mmm.trainer.config.training import CheckpointOptions
from mmm.trainer.job import Job
from mmm.trainer.run import core
from mmm.trainer.run.agreement import Agreement
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.resume import ResumableRecord
from mmm.trainer.run.rows import Row
from mmm.trainer.run.startup import StartUp


def standard_hooks(checkpoint: CheckpointOptions, profile: ProfileOptions, *before_record: Hook) -> list[Hook]:
    """A trainer's. A hook that adds to rows stands before the record."""
    return [
        MemoryCheck(),
        Agreement(),
        Hang(),
        StartUp(),
        *installed_hooks(),
        *before_record,
        ResumableRecord(checkpoint),
        Trackers(profile.tracker),
    ]


def installed_hooks() -> list[Hook]:
    """Hooks that other installed packages add to every trainer, such as the planner's prediction.

    A package names each in its entry points: group ``mmm.hooks``, a class that is called without arguments.
    """
    return [point.load()() for point in entry_points(group="mmm.hooks")]


def script_hooks() -> list[Hook]:
    """Those of a program of one's own."""
    return [Agreement(), Hang(), StartUp(), ResumableRecord()]


def start_run(
    name: str, config: Any, resolved: Job | Layout, hooks: Sequence[Hook] | None = None
) -> AbstractContextManager[Run]:
    """`mmm.trainer.run.core.start_run`, for a program of one's own.

    Args:
        hooks: None for `script_hooks`.
    """
    return core.start_run(name, config, resolved, script_hooks() if hooks is None else hooks)


class MemoryCheck(Hook):
    """A model of the package's that cannot fit into the memory that is there is refused before the ranks meet."""

    def before(self, run: Run) -> None:
        spec = run.resolved
        if spec.partition is not None and not run.dry:
            techniques = spec.techniques
            parameters = spec.partition.parameters(spec.model, spec.layout.pp, techniques.schedule)
            holds = Footprint(parameters, techniques.data_parallel, STATE[spec.optimizer], techniques.offload)
            check_fits(holds, run.layout, run.rank, run.device, run.precision)


class Hang(Hook):
    """A collective that times out ends the run with a message that says which ranks have not come."""

    def __init__(self) -> None:
        self.watch: HangWatch | None = None

    def start(self, run: Run) -> None:
        if not run.dry:
            self.watch = HangWatch(run.rank, run.options.timeout, run.clock)
            self.watch.__enter__()

    def end(self, run: Run, error: BaseException | None) -> None:
        if self.watch is not None:
            self.watch.__exit__(type(error), error, None)


class Trackers(Hook):
    """--tracker: a run's rows where others look for them. It stands after the record, into whose folder most trackers
    write."""

    def __init__(self, tracker: str | None) -> None:
        self.tracker = tracker
        self.tracked: Tracked | None = None

    def start(self, run: Run) -> None:
        if run.outdir is not None:
            named = {} if run.options.name is None else {"name": run.options.name}
            config = named | {"command": command_line(), "layout": str(run.layout)}
            self.tracked = Tracked(self.tracker, run.outdir, config)

    def row(self, run: Run, row: Row) -> None:
        if self.tracked is not None:
            of_rank_0 = {name: float(values[0]) for name, values in row.per_rank.items()}
            self.tracked.row({**row.numbers, **of_rank_0})

    def end(self, run: Run, error: BaseException | None) -> None:
        if self.tracked is not None:
            self.tracked.close()
