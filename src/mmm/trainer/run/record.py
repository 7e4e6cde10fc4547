"""The record of a run: what it is, in the log and in config.json, its rows, and pictures of them. On rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mmm import history
from mmm.errors import ConfigError, DivergedError, RecordError, UserError
from mmm.history.record.attempts import make_room, this_attempt
from mmm.history.record.dataset import legend
from mmm.history.record.ending import RUNNING, Ending
from mmm.history.record.repository import repository_of
from mmm.runtime.agreement import agree
from mmm.runtime.contract import ELASTIC_VARIABLE, LINE_VARIABLE, SITE_VARIABLE, started
from mmm.runtime.device import collective_library, devices_in_use
from mmm.runtime.process_group import gather_objects
from mmm.runtime.ranks import command_line
from mmm.trainer.config.run import StepOptions, flags_of
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.lines import WHAT_A_LINE_HAS, done, row_line
from mmm.trainer.run.rows import Row, Totals
from mmm.trainer.run.tables import mesh_table, rank_table
from mmm.units import counted

if TYPE_CHECKING:
    from mmm.history.record.resume import Resume

DRAW = "mmm.history.plots.draw"  # the module, which no run imports


class Record(Hook):
    """Keeps a run in its folder.

    Attributes:
        history: the rows; on rank 0, while the run goes on and after it.
        facts: of config.json.
        ranks: what each rank says of itself; on rank 0.
        totals: of the rows, on rank 0.
    """

    def __init__(self) -> None:
        self.history: history.History | None = None
        self.facts: dict[str, Any] = {"notes": []}
        self.ranks: list[dict[str, Any]] = []
        self.totals = Totals()
        self._encoded: dict[str, str] = {}  # config.json, once the folder is known to be this run's
        self._folder: Path | None = None
        self._folder_note = ""
        self._has_legend = False
        self._is_curve = False  # a record of the first row alone has none

    def before(self, run: Run) -> None:
        if run.rank.is_main and not run.dry:
            file = getattr(sys.modules.get("__main__"), "__file__", None)
            self.facts["repository"] = repository_of(file)

    def meet(self, run: Run, store: dist.Store) -> None:
        agree(store, run.rank, {}, then=lambda: self.prepare(run))

    def prepare(self, run: Run) -> None:
        """Make the run's folder, on rank 0. Raises RecordError, ConfigError, on every rank."""
        outdir = run.options.outdir
        if ELASTIC_VARIABLE in os.environ:
            raise ConfigError(f"launch --elastic: {run.name} saves no checkpoints, from which other ranks could go on")
        if outdir is not None:
            self._folder_note = make_room(Path(outdir).expanduser().absolute(), this_attempt()) or ""
        run.outdir = history.prepare(outdir, run.name, run.options.overwrite, name=run.options.name)

    def start(self, run: Run) -> None:
        self.ranks = all_ranks(run)
        self.describe(run, facts_of(run) | {"ranks": self.ranks})
        self.facts["hosts"] = sorted({about["host"] for about in self.ranks})
        run.log.info("%s\n%s", opening(run, self.ranks), tables(run, self.ranks))
        self._describe_resolved(run)
        self.open(run)

    def open(self, run: Run) -> None:
        """Begin the rows, or go on with those that are there. A collective."""
        resume = self.resume(run)
        if run.outdir is not None:
            self._folder = run.outdir
            self.describe(run, self.facts)
            self.history = history.History(
                run.outdir, ranks=self.ranks, flush_every=run.options.flush_every, resume=resume
            )

    def _describe_resolved(self, run: Run) -> None:
        """What has been decided before the run: its data, its model, and notes of both."""
        if self._folder_note:
            run.note(self._folder_note)
        if (data := run.resolved.describe_data()) is not None:
            self.describe(run, {"data": data})
            run.log.info("data: %s", data_text(data))
            if data.get("note"):  # another data set stands in for the one asked for, say
                run.note(data["note"])
        if (spec := run.training_spec) is not None:
            if run.rank.is_main or run.options.log_all_ranks:
                run.log.info("model:\n%s", spec.summary())
            self.describe(run, spec.describe())
        for note in run.resolved.notes:
            run.note(note)

    def resume(self, run: Run) -> Resume | None:
        """How the rows of a record that is there go on; None for one that begins. A collective."""
        return None

    def describe(self, run: Run, facts: Mapping[str, Any]) -> None:
        facts = dict(facts)
        if (note := facts.pop("note", None)) is not None:
            self.facts["notes"].append(note)
            facts["notes"] = self.facts["notes"]
        self.facts.update(facts)
        if self._folder is None:
            return
        self._encoded |= {name: history.encode(value) for name, value in facts.items()}
        ending = self.history.ending if self.history is not None else Ending(RUNNING)
        ended = {name: history.encode(value) for name, value in ending.attrs().items()}
        try:
            history.write_encoded(self._folder, self._encoded | ended)
        except RecordError as error:
            if ending.state == RUNNING:
                raise
            run.log.warning("%s", error)  # the run has ended as it has, and its rows are on the disk

    def row(self, run: Run, row: Row) -> None:
        self._is_curve |= any(row.at.values())
        if self.history is not None:
            self.totals.add(row)
            if not self._has_legend:
                self._has_legend = True
                run.log.info("%s\n  (%s)", legend(row.numbers), WHAT_A_LINE_HAS)
            self.history.update(row.numbers, row.per_rank)
            steps = self.steps(run, row.at)
            row.line = row_line(row.numbers, run.name, steps, self.totals.left(steps))

    def steps(self, run: Run, at: Mapping[str, int]) -> float | None:
        """How many there will be of what a row counts; None where that is not known."""
        if "iter" not in at:
            return getattr(run.options, "epochs", None)
        steps = self.facts.get("steps")
        return steps if isinstance(steps, int) else None

    def end(self, run: Run, error: BaseException | None) -> None:
        self.close(run, error)
        if error is None and self.history is not None and self._is_curve:
            run.log.info("%s", done(self.totals, time.time() - began()))
            for line in self.kept(run, self.history.outdir):
                run.log.info("%s", line)
        ended, outdir = error is None and self._is_curve, run.outdir
        if ended and outdir is not None and draws_plots(run) and draw(DRAW, outdir):
            run.log.info("pictures: %s", outdir / "plots" / "mplot" / "pngs" / "summary.png")

    def kept(self, run: Run, outdir: Path) -> list[str]:
        """Where the weights are, at the run's end, and the line that goes on from them."""
        return []

    def close(self, run: Run, error: BaseException | None) -> None:
        """The record is complete. error: what has ended the run."""
        if self.history is None:
            return
        refused = isinstance(error, UserError) and not isinstance(error, DivergedError)
        if refused and self.history.discard():  # the next try may have the same --outdir
            self._folder = None
            return
        if self.history.ending.state == RUNNING:
            with suppress(RecordError):  # the history says it, if it cannot be written either
                self.describe(run, end_of(run, self.totals))
        self.history.__exit__(None if error is None else type(error), error, None)
        if error is None and len(self.history):
            run.log.info("record: %s", self.history.outdir / "train_dataset.h5")


def opening(run: Run, ranks: Sequence[Mapping[str, Any]]) -> str:
    """What the run is on: ``4 ranks (launch), layout dp2·tp2, cpu, fp32 (why); gloo; vm: 4 ranks on 2 CPU cores``.

    Args:
        ranks: of `all_ranks`, on rank 0.
    """
    here = socket.gethostname()
    devices = devices_in_use(run.device, sum(about["host"] == here for about in ranks) or 1)
    return (
        f"{counted(run.rank.world_size, 'rank')} ({run.rank.source}), layout {run.layout}, {run.device.type}, "
        f"{run.precision.name} ({run.precision.reason}); {collective_library()}; {here}: {devices}"
    )


def tables(run: Run, ranks: Sequence[dict[str, Any]]) -> str:
    """The ranks, and how they lie on the mesh."""
    if not ranks:
        return "(rank 0 has the table)"
    return "\n".join(filter(None, (rank_table(ranks), mesh_table(run.layout))))


def draws_plots(run: Run) -> bool:
    """Whether --plots says so; not of a program that has no such flag."""
    return isinstance(run.options, StepOptions) and run.options.plots


def draw(module: str, *paths: Path) -> bool:
    """Have a module draw by a process of its own; whether it did."""
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", module, *map(str, paths)], check=False).returncode == 0


def data_text(data: Mapping[str, Any]) -> str:
    """``text, my.txt: 1 file, 1,003,854 train bytes, 111,540 validation bytes``."""
    counts = []
    for name, value in data.items():
        if isinstance(value, int):
            noun = name.replace("_", " ")  # such as "files", "train bytes"
            counts.append(counted(value, noun.removesuffix("s"), noun))
    return f"{', '.join(str(data[name]) for name in ('dataset', 'source') if name in data)}: {', '.join(counts)}"


def add_row(run: Run, numbers: Mapping[str, float]) -> None:
    """Keep a row that no step has made, such as a line of a table of measurements. On rank 0; others do nothing."""
    record = run.hook(Record)
    if record is not None and record.history is not None:
        record.history.update(numbers)


def end_of(run: Run, totals: Totals) -> dict[str, Any]:
    """What config.json says of a run that is over; of one that was resumed, of its last part. On rank 0."""
    seconds = time.time() - began()
    return {
        "ended": utc(time.time()),
        "seconds": seconds,
        "device_hours": seconds * run.rank.world_size / 3600,
        "mean_rates": totals.rates(),
    }


def began() -> float:
    """When `launch`, or else this process, was started: in seconds since 1970."""
    return started(os.environ, time.time())[0]


def utc(seconds: float) -> str:
    """A time since 1970 as ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def facts_of(run: Run) -> dict[str, Any]:
    """What config.json says of every run."""
    attempt = this_attempt()
    return {
        "module": run.name,
        "name": run.options.name,
        "started": utc(began()),
        "command": command_line(),
        "options": flags_of(run.config),
        "layout": str(run.layout),
        "mesh": run.layout.sizes,
        "precision": {"name": run.precision.name, "reason": run.precision.reason},
        "started_by": run.rank.source,
        "launch": os.environ.get(LINE_VARIABLE),
        "site": json.loads(os.environ.get(SITE_VARIABLE, "null")),
        "attempt": None if attempt is None else attempt._asdict(),
        "python": sys.executable,
        "versions": history.versions(),
        "hosts": [],
    }


def all_ranks(run: Run) -> list[dict[str, Any]]:
    """What every rank says of itself, by rank, on rank 0. A collective."""
    local = {
        "rank": run.rank.rank,
        "local_rank": run.rank.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(run.device),
    }
    return [{**about, **run.layout.coordinates(about["rank"])} for about in gather_objects(run.rank, local)]
