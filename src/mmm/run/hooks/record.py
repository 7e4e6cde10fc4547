"""The record of a run: what it is, in the log and in config.json, its rows, and pictures of them. Written by rank 0."""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmm import history
from mmm.checkpoint.manifest import remove_partial
from mmm.errors import ConfigError, DivergedError, RecordError, UserError
from mmm.history.record.attempts import make_room, this_attempt
from mmm.history.record.dataset import legend
from mmm.history.record.ending import RUNNING, Ending, read_config
from mmm.history.record.folder import writable
from mmm.history.record.repository import repository_of
from mmm.run import config_file
from mmm.run.hook import Hook
from mmm.run.lines import WHAT_A_LINE_HAS, done, row_line, used
from mmm.run.origin import CHECKPOINTS
from mmm.run.rows import Row, Totals
from mmm.run.run import Run
from mmm.run.tables import mesh_table, rank_table
from mmm.runtime.agreement import agree
from mmm.runtime.device import collective_library, devices_in_use
from mmm.runtime.ranks import command_line
from mmm.runtime.startup import started
from mmm.units import counted
from mmm_launch.contract import ELASTIC_VARIABLE, LINE_VARIABLE, SITE_VARIABLE

# This module imports matplotlib, so it runs in a process of its own, and no run imports it.
DRAW = "mmm.history.plots.draw"


class Record(Hook):
    """Keeps a run in its folder. It comes after the hooks that add to rows.

    Attributes:
        history: the rows, on rank 0, during the run and after it.
        ranks: what each rank says of itself, on rank 0.
        totals: sums over the rows, on rank 0.
    """

    def __init__(self) -> None:
        self.history: history.History | None = None
        self.ranks: list[dict[str, Any]] = []
        self.totals = Totals()
        # The values of config.json as JSON, by name. Large ones that stay the same are encoded once.
        self._encoded: dict[str, str] = {}
        # Known once the folder is certain to be this run's: until then config.json is not written.
        self._folder: Path | None = None
        self._folder_note: str | None = None
        self._has_legend = False
        # A record with only a first row has no curve to draw.
        self._is_curve = False

    def before(self, run: Run) -> None:
        if run.rank.is_main and not run.comm.dry:
            file = getattr(sys.modules.get("__main__"), "__file__", None)
            run.describe(repository=repository_of(file))

    def meet(self, run: Run, store: dist.Store) -> None:
        agree(store, run.rank, {}, then=lambda: self._prepare(run))

    def _prepare(self, run: Run) -> None:
        """Make the run's folder, on rank 0. Raises RecordError, ConfigError, on every rank."""
        options = run.options
        if ELASTIC_VARIABLE in os.environ and not run.saves:
            raise ConfigError(f"launch --elastic: {run.name} saves no checkpoints, from which other ranks could resume")
        if options.outdir is not None and not run.keeps_record:
            folder = Path(options.outdir).expanduser().absolute()
            self._folder_note = make_room(folder, this_attempt())
        run.outdir = history.prepare(options.outdir, run.name, options.overwrite, run.keeps_record, options.name)
        if run.saves:
            checkpoints = writable(run.outdir / CHECKPOINTS)
            # What a killed run was writing.
            remove_partial(checkpoints)

    def start(self, run: Run) -> None:
        self.ranks = all_ranks(run)
        hosts = sorted({about["host"] for about in self.ranks})
        run.describe(**facts_of(run), ranks=self.ranks, hosts=hosts)
        lines = opening(run, self.ranks)
        mesh = mesh_table(run.layout)
        if mesh:
            lines += f"\n{mesh}"
        run.log.info("%s", lines)
        # Only rank 0 has the list.
        if self.ranks:
            run.log.debug("ranks:\n%s", rank_table(self.ranks))
        self._describe_job(run)
        # A resumed run opens its rows in `state`, once the program's state fits the checkpoint.
        if run.origin is None:
            self._open(run)

    def state(self, run: Run) -> None:
        if self.history is None:
            self.totals.first = run.first
            self._open(run)

    def loop(self, run: Run) -> None:
        # The job of a trainer has said it before.
        if run.facts.get("steps") != run.total:
            run.describe(steps=run.total)

    def _open(self, run: Run) -> None:
        """Begin the rows, or continue those that are in the folder."""
        if run.outdir is None:
            return
        if run.resume is not None and run.origin is not None:
            keep_earlier_facts(run, read_config(run.outdir))
        self._folder = run.outdir
        self.describe(run, run.facts)
        self.history = history.History(
            run.outdir, ranks=self.ranks, flush_every=run.options.flush_every, resume=run.resume
        )
        run.history = self.history

    def _describe_job(self, run: Run) -> None:
        """Log and keep what was decided before the run: its data, its model, and notes on both."""
        if self._folder_note:
            run.note(self._folder_note)
        if run.job is None:
            return
        data = run.job.describe_data()
        if data is not None:
            run.describe(data=data)
            run.log.info("data: %s", data_text(data))
            # Such as that another data set takes the place of the one asked for.
            if data.get("note"):
                run.note(data["note"])
        if run.job.model is not None:
            # The summary costs some time, so only ranks that log it make it.
            if run.log.isEnabledFor(logging.DEBUG):
                run.log.debug("model:\n%s", run.job.summary())
            run.describe(**run.job.describe())
        for note in run.job.notes:
            run.note(note)

    def describe(self, run: Run, facts: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        for name, value in facts.items():
            self._encoded[name] = history.encode(value)
        ending = Ending(RUNNING)
        if self.history is not None:
            ending = self.history.ending
        encoded = dict(self._encoded)
        for name, value in ending.attrs().items():
            encoded[name] = history.encode(value)
        try:
            history.write_encoded(self._folder, encoded)
        except RecordError as error:
            if ending.state == RUNNING:
                raise
            # The run is over, and its rows are on the disk: a full disk must not make it fail now.
            run.log.warning("%s", error)

    def row(self, run: Run, row: Row) -> None:
        self._is_curve |= any(row.place.values())
        if self.history is None:
            return
        self.totals.add(row)
        if not self._has_legend:
            self._has_legend = True
            run.log.debug("%s\n  (%s)", legend(row.values), WHAT_A_LINE_HAS)
        self.history.update(row.values, row.per_rank)
        # Of the loop; or its epochs, if rows are those of epochs. Then the number may not be known.
        steps: int | None = run.total
        if "iter" not in row.place:
            steps = run.flags.get("epochs")
        left = self.totals.left(steps)
        row.line = row_line(row.values, run.name, steps, left)

    def end(self, run: Run, error: BaseException | None) -> None:
        self._close(run, error)
        if error is not None or not self._is_curve:
            return
        if self.history is not None:
            seconds = time.time() - began()
            run.log.info("%s", done(self.totals, seconds))
            run.log.info("%s", used())
        outdir = run.outdir
        if outdir is None:
            return
        if not run.options.plots:
            run.log.info("pictures: mmm history %s --plots", shlex.quote(str(outdir)))
        elif draw(DRAW, outdir):
            run.log.info("pictures: %s", outdir / "plots" / "mplot" / "pngs" / "summary.png")

    def _close(self, run: Run, error: BaseException | None) -> None:
        """Complete the record.

        Args:
            error: what has ended the run.
        """
        if self.history is None:
            return
        refused = isinstance(error, UserError) and not isinstance(error, DivergedError)
        # A run that was refused leaves nothing, so that the next try may have the same --outdir.
        if refused and self.history.discard():
            self._folder = None
            return
        if self.history.ending.state == RUNNING:
            # The history says so below if it cannot be written either.
            with suppress(RecordError):
                run.describe(**end_of(run, self.totals))
        error_type = None if error is None else type(error)
        self.history.__exit__(error_type, error, None)
        if error is None and len(self.history):
            run.log.info("record: %s", self.history.outdir / "train_dataset.h5")


def keep_earlier_facts(run: Run, config: Mapping[str, Any]) -> None:
    """Keep the notes and the sampled texts of the part of a run before it was resumed.

    Args:
        config: config.json as that part has left it. Anybody may have edited it.
    """
    notes = config.get("notes")
    if isinstance(notes, list):
        own = run.facts["notes"]
        # Each attempt makes some of the same notes.
        earlier_notes = [note for note in notes if note not in own]
        run.facts["notes"] = earlier_notes + own
    samples = config.get("samples")
    if isinstance(samples, list):
        earlier = []
        for sample in samples:
            step = sample.get("iter") if isinstance(sample, dict) else None
            # Steps after the checkpoint are made again, and sampled again.
            if isinstance(step, int) and step < run.first:
                earlier.append(sample)
        run.facts["samples"] = earlier


def opening(run: Run, ranks: Sequence[Mapping[str, Any]]) -> str:
    """What the run is on: ``4 ranks (launch), layout dp2·tp2, cpu, fp32 (why); gloo; vm: 4 ranks on 2 CPU cores``.

    Args:
        ranks: what each rank says of itself, as `all_ranks` returns it on rank 0.
    """
    host = socket.gethostname()
    ranks_on_host = sum(about["host"] == host for about in ranks)
    devices = devices_in_use(run.device, ranks_on_host or 1)
    ranks_text = f"{counted(run.rank.world_size, 'rank')} ({run.rank.source})"
    precision = f"{run.precision.name} ({run.precision.reason})"
    return (
        f"{ranks_text}, layout {run.layout}, {run.device.type}, {precision}; {collective_library()}; {host}: {devices}"
    )


def draw(module: str, *paths: Path) -> bool:
    """Run a module that draws, in a process of its own. Returns whether it succeeded."""
    sys.stdout.flush()
    command = [sys.executable, "-m", module, *map(str, paths)]
    return subprocess.run(command, check=False).returncode == 0


def data_text(data: Mapping[str, Any]) -> str:
    """``text, my.txt: 1 file, 1,003,854 train bytes, 111,540 validation bytes``."""
    names = [str(data[name]) for name in ("dataset", "source") if name in data]
    counts = []
    for name, value in data.items():
        if isinstance(value, int):
            # Such as "files", "train bytes".
            noun = name.replace("_", " ")
            counts.append(counted(value, noun.removesuffix("s"), noun))
    return f"{', '.join(names)}: {', '.join(counts)}"


def end_of(run: Run, totals: Totals) -> dict[str, Any]:
    """What config.json says of a run that is over; if it was resumed, of its last part. On rank 0."""
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
    """A time in seconds since 1970, as ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def facts_of(run: Run) -> dict[str, Any]:
    """What config.json says of every run."""
    attempt = this_attempt()
    return {
        "module": run.name,
        "name": run.options.name,
        "started": utc(began()),
        "command": command_line(),
        "folder": os.getcwd(),
        "options": run.flags,
        **config_file.facts,
        "layout": str(run.layout),
        "mesh": run.layout.sizes,
        "precision": {"name": run.precision.name, "reason": run.precision.reason},
        "started_by": run.rank.source,
        "launch": os.environ.get(LINE_VARIABLE),
        "site": json.loads(os.environ.get(SITE_VARIABLE, "null")),
        "attempt": None if attempt is None else attempt.as_record(),
        "python": sys.executable,
        "versions": history.versions(),
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
    ranks = []
    for about in run.comm.gather(local):
        coordinates = run.layout.coordinates(about["rank"])
        ranks.append({**about, **coordinates})
    return ranks
