"""A run's folder: what the run is, in the log and in config.json; its rows; its checkpoints; pictures.

What happens in the folder, in which order, is in `Folder`. How a run is saved and resumed is in `mmm.run.checkpoints`,
which programs without checkpoints do not import.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mmm import history
from mmm.errors import ConfigError, DivergedError, RecordError, UserError
from mmm.history.record.attempts import make_room, this_attempt
from mmm.history.record.dataset import legend
from mmm.history.record.ending import RUNNING, Ending, read_config
from mmm.history.record.repository import repository_of
from mmm.run.facts import all_ranks, began, data_text, end_of, facts_of, keep_earlier_facts, opening
from mmm.run.hook import Hook, Loop
from mmm.run.lines import WHAT_A_LINE_HAS, done, row_line, used
from mmm.run.rows import Row, Totals
from mmm.run.tables import mesh_table, rank_table
from mmm.runtime.agreement import agree
from mmm_launch.contract import ELASTIC_VARIABLE

if TYPE_CHECKING:
    from mmm.run.checkpoints import Checkpoints
    from mmm.run.run import Run
    from mmm.run.step import Step

# This module imports matplotlib, so it runs in a process of its own, and no run imports it.
DRAW = "mmm.history.plots.draw"


class Folder(Hook):
    """The folder of a run. It is the last of the run's hooks: the others add to rows, and end before it.

    Attributes:
        checkpoints: saves the run, and resumes it. None: the program has no checkpoints.
        path: the folder, on rank 0, once it is the run's.
        rows: the rows, on rank 0, while they are recorded.
        ranks: what each rank says of itself, on rank 0.
        totals: sums over the rows, on rank 0.
        exits: context managers that are closed once all is written.
    """

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        self.checkpoints = checkpoints
        self.path: Path | None = None
        self.rows: history.History | None = None
        self.ranks: list[dict[str, Any]] = []
        self.totals = Totals()
        self.exits = ExitStack()
        # Whether config.json may be written: it is not before the folder is certain to be this run's.
        self._is_open = False
        self._note: str | None = None
        # Number of steps of the current loop.
        self._steps = 0
        # A record with only a first row has no curve to draw.
        self._is_curve = False

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.origin is not None

    def before(self, run: Run) -> None:
        if self.checkpoints is not None:
            self.checkpoints.check(run)
        if run.rank.is_main and not run.comm.dry:
            file = getattr(sys.modules.get("__main__"), "__file__", None)
            run.describe(repository=repository_of(file))

    def meet(self, run: Run, store: dist.Store) -> None:
        agree(store, run.rank, {}, then=lambda: self._claim(run))

    def _claim(self, run: Run) -> None:
        """Make the folder, or take it over from the run that this one continues. On rank 0.

        Raises:
            UserError: the folder cannot be this run's. On every rank.
        """
        options = run.options
        keeps_record = False
        if self.checkpoints is not None:
            keeps_record = self.checkpoints.find(run)
        elif ELASTIC_VARIABLE in os.environ:
            raise ConfigError(f"launch --elastic: {run.name} saves no checkpoints, from which other ranks could resume")
        if options.outdir is not None and not keeps_record:
            self._note = make_room(options.outdir, this_attempt())
        self.path = history.prepare(options.outdir, run.name, options.overwrite, keeps_record, options.name)
        if self.checkpoints is not None:
            self.checkpoints.make_folder(self.path)

    def start(self, run: Run) -> None:
        if self.checkpoints is not None:
            self.checkpoints.start(run, self.exits)
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
        if not self.resumes:
            self._open(run)

    def _describe_job(self, run: Run) -> None:
        """Log and keep what was decided before the run: its data, its model, and notes on both."""
        if self._note:
            run.note(self._note)
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

    def _open(self, run: Run) -> None:
        """Begin the rows, or continue those that are in the folder."""
        if self.path is None:
            return
        resume = None
        if self.checkpoints is not None:
            resume = self.checkpoints.continued_record(run, self.path)
        if resume is not None and self.resumes:
            keep_earlier_facts(run, read_config(self.path))
        self._is_open = True
        self.describe(run)
        self.rows = history.History(self.path, ranks=self.ranks, flush_every=run.options.flush_every, resume=resume)

    def state(self, run: Run) -> None:
        if self.checkpoints is not None:
            self.checkpoints.state(run, self.path)
        if self.rows is None:
            self.totals.first = run.first
            self._open(run)

    def loop(self, run: Run, loop: Loop) -> None:
        if self.checkpoints is not None:
            self.checkpoints.loop(run, loop)
        self._steps = loop.steps
        # The job of a trainer has said it before.
        if run.facts.get("steps") != loop.steps:
            run.describe(steps=loop.steps)

    def begin(self, run: Run, step: Step) -> None:
        if self.checkpoints is not None:
            self.checkpoints.begin(step)

    def row(self, run: Run, row: Row) -> None:
        self._is_curve |= any(row.place.values())
        if self.rows is None:
            return
        if not self.totals.made:
            run.log.debug("%s\n  (%s)", legend(row.values), WHAT_A_LINE_HAS)
        self.totals.add(row)
        self.rows.update(row.values, row.per_rank)
        # Of the loop; or its epochs, if rows are those of epochs. Then the number may not be known.
        steps: int | None = self._steps
        if "iter" not in row.place:
            steps = run.flags.get("epochs")
        left = self.totals.left(steps)
        row.line = row_line(row.values, run.name, steps, left)

    def finish(self, run: Run, step: Step) -> None:
        """Save the step, if it is saved: first its rows, then the checkpoint. A signal ends the run after that."""
        checkpoints = self.checkpoints
        if checkpoints is None:
            return
        if step.saves:
            n_rows = 0
            if self.rows is not None:
                # The checkpoint counts on these rows, also if no row ends with this step.
                self.rows.flush()
                n_rows = len(self.rows)
            checkpoints.save(run, step, n_rows)
        checkpoints.finish(step)
        if checkpoints.is_stopped:
            checkpoints.stop(run, step)

    def describe(self, run: Run) -> None:
        """Write config.json, which has all facts of the run."""
        if not self._is_open or self.path is None:
            return
        ending = Ending(RUNNING) if self.rows is None else self.rows.ending
        try:
            history.write_config(self.path, {**run.facts, **ending.attrs()})
        except RecordError as error:
            if ending.state == RUNNING:
                raise
            # The run is over, and its rows are on the disk: a full disk must not make it fail now.
            run.log.warning("%s", error)

    def end(self, run: Run, error: BaseException | None) -> None:
        """Complete what is in the folder, whatever has ended the run."""
        with self.exits:
            try:
                if self.checkpoints is not None and error is None:
                    self.checkpoints.end(run, self.path)
            except BaseException as raised:
                self._close(run, raised)
                raise
            self._close(run, error)
            if error is None and self._is_curve and self.path is not None:
                self._say_done(run, self.path)

    def _close(self, run: Run, error: BaseException | None) -> None:
        """Complete the record.

        Args:
            error: what has ended the run.
        """
        if self.rows is None:
            return
        refused = isinstance(error, UserError) and not isinstance(error, DivergedError)
        # A run that was refused leaves nothing, so that the next try may have the same --outdir.
        if refused and self.rows.discard():
            self._is_open = False
            return
        if self.rows.ending.state == RUNNING:
            # The history says so below if it cannot be written either.
            with suppress(RecordError):
                run.describe(**end_of(run, self.totals))
        error_type = None if error is None else type(error)
        self.rows.__exit__(error_type, error, None)
        if error is None and len(self.rows):
            run.log.info("record: %s", self.rows.outdir / "train_dataset.h5")

    def _say_done(self, run: Run, path: Path) -> None:
        run.log.info("%s", done(self.totals, time.time() - began()))
        run.log.info("%s", used())
        if not run.options.plots:
            run.log.info("pictures: mmm history %s --plots", shlex.quote(str(path)))
        elif draw(DRAW, path):
            run.log.info("pictures: %s", path / "plots" / "mplot" / "pngs" / "summary.png")


def draw(module: str, *paths: Path) -> bool:
    """Run a module that draws, in a process of its own. Returns whether it succeeded."""
    sys.stdout.flush()
    command = [sys.executable, "-m", module, *map(str, paths)]
    return subprocess.run(command, check=False).returncode == 0
