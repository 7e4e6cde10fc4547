"""Where a run goes on: which checkpoint, whether it is whole and of this run, and what its record keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmm import history
from mmm.checkpoint.manifest import (
    remove_partial,
    steps_of,
)
from mmm.errors import CheckpointError, ConfigError
from mmm.history.record.attempts import Attempt, make_room, this_attempt
from mmm.history.record.folder import DATASET, JOURNAL, writable
from mmm.history.record.resume import Resume, check_over
from mmm.runtime.contract import ELASTIC_VARIABLE
from mmm.runtime.process_group import broadcast_object
from mmm.runtime.stop import StopSignal, stop_signal
from mmm.trainer.config.run import BaseOptions
from mmm.trainer.config.training import CheckpointOptions, check_resume
from mmm.trainer.run.core import Run
from mmm.trainer.run.origin import Origin, check_files, check_origin, check_steps_left, identity_of
from mmm.trainer.run.record import Record

AUTO, CHECKPOINTS = Path("auto"), "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, on rank 0.

    Attributes:
        found: checkpoints to go on from, the best first. auto: whether the next is taken where one is damaged.
        goes_on: with the record that is in the folder, if any.
        note: what was done with the record of an earlier attempt of the same launch.
    """

    outdir: Path
    found: tuple[Path, ...] = ()
    auto: bool = False
    goes_on: bool = False
    note: str | None = None


class ResumableRecord(Record):
    """The record of a run that may go on from a checkpoint.

    Attributes:
        folder: of the run, on rank 0.
        origin: the checkpoint that it goes on from, if any.
        identity: of those that it can go on from.
        stop: the signal to, if one has come.
        finish_save: waits for the save under way, once the program's loop saves.
    """

    def __init__(self, options: CheckpointOptions | None = None) -> None:
        """
        Args:
            options: None: those of the run's config, which are checked; the record of one without is as `Record`.
        """
        super().__init__()
        self.options = options
        self.finish_save: Callable[[], object] | None = None
        self.folder: RunFolder | None = None
        self.origin: Origin | None = None
        self.identity: dict[str, Any] = {}
        self.stop = StopSignal()
        self._stack = ExitStack()

    def before(self, run: Run) -> None:
        super().before(run)
        if self.options is None and (options := options_in(run.config)) is not None:
            CheckpointOptions.check(options)  # a config that derives from it may have another first
            check_resume(options, run.options)
            self.options = options

    def prepare(self, run: Run) -> None:
        if self.options is None:
            return super().prepare(run)
        self.folder = prepare(run.name, run.options, self.options, this_attempt())
        self._folder_note = self.folder.note or ""
        run.outdir = self.folder.outdir
        return None

    def start(self, run: Run) -> None:
        if self.options is not None and self.options.checkpoint_every is not None:
            self.stop = self._stack.enter_context(stop_signal())
        super().start(run)

    def open(self, run: Run) -> None:
        choose(run, self)
        if self.origin is not None:
            self.totals.first = self.origin.manifest.step
        if self.origin is None or run.training_spec is not None:  # else a loop of its own compares more, and opens it
            super().open(run)

    def go_on(self, run: Run) -> None:
        """The loop's own objects fit the checkpoint. A collective."""
        super().open(run)

    def resume(self, run: Run) -> Resume | None:
        return None if self.folder is None else record_goes_on(self.folder, self.origin, str(run.layout))

    def kept(self, run: Run, outdir: Path) -> list[str]:
        if self.options is None:
            return []
        model, found = outdir / "model.pt", steps_of(outdir / CHECKPOINTS)
        files = [below(path) for path in (model, *found[:1]) if path.exists()]
        lines = [f"weights: {', '.join(files) if files else 'none are kept'}"]
        if found:
            lines.append(f"to go on: the same command with {flags_that_go_on(outdir, run.options, self.totals.count)}")
        return lines

    def close(self, run: Run, error: BaseException | None) -> None:
        if error is None and self.finish_save is not None:
            self.finish_save()  # of a loop that was left before its end
        elif error is None and self.options is not None and (self.options.resume or self.options.checkpoint_every):
            run.note("--resume and --checkpoint_every had no effect: no loop of this program reads them")
        try:
            super().close(run, error)
        finally:
            self._stack.close()


def options_in(config: Any) -> CheckpointOptions | None:
    """The flags of checkpoints of a program's config, which may be one of its groups; None where it has none."""
    groups = (config, *vars(config).values())
    return next((group for group in groups if isinstance(group, CheckpointOptions)), None)


def prepare(module: str, run: BaseOptions, options: CheckpointOptions, this: Attempt | None) -> RunFolder:
    """Prepare the folder of a run; on rank 0, before any process group.

    Raises:
        CheckpointError: there is no checkpoint where ``--resume`` says; or there are some, and nothing says to go on.
        ConfigError: `launch --elastic` is to go on from checkpoints, and there would be none, or not with this batch.
        RecordError: the folder holds a record that does not go on, or cannot be written.
    """
    needed = {
        "checkpoint_every": options.checkpoint_every,
        "outdir": run.outdir,
        "global_batch_size": getattr(run, "global_batch_size", None),
    }
    missing = [f"--{name}" for name, value in needed.items() if value is None]
    if missing and ELASTIC_VARIABLE in os.environ:
        raise ConfigError(
            f"launch --elastic: to go on with another number of ranks {module} needs {' and '.join(missing)} as well"
        )
    given = None if run.outdir is None else run.outdir.expanduser().absolute()
    saves, note = options.checkpoint_every is not None, None
    own = steps_of(given / CHECKPOINTS) if given is not None and (saves or options.resume is not None) else []
    again = this is not None and this.number > 0 and saves and given is not None
    auto = options.resume == AUTO or (again and bool(own or options.resume is None))
    found, goes_on = own, auto
    if not auto and options.resume is not None:
        found = _at(options.resume.expanduser().absolute())
        goes_on = found[0].resolve().parent in [path.resolve().parent for path in own]
    elif not auto:
        found = []
    if goes_on and given is not None:
        if not auto and found[0].name != own[0].name:
            raise CheckpointError(
                f"--resume {found[0]}: {own[0].name} is newer, and the run's folder would have two histories; give "
                "another --outdir, or remove the newer ones"
            )
        check_over(given, this, bool(found))
    elif own and saves:
        why = "--overwrite replaces the record and leaves checkpoints, which are costly; " if run.overwrite else ""
        raise CheckpointError(
            f"{own[0].parent} has checkpoints of an earlier run ({own[0].name} is the newest), and this one would "
            f"save among them: {why}give --resume auto to go on from there, another --outdir, or remove them"
        )
    elif given is not None:
        note = make_room(given, this)
    outdir = history.prepare(run.outdir, module, run.overwrite, goes_on, run.name)
    if saves:
        writable(outdir / CHECKPOINTS)
        remove_partial(outdir / CHECKPOINTS)
    return RunFolder(outdir, tuple(found), auto, goes_on, note)


def _at(path: Path) -> list[Path]:
    """The checkpoint at a path: the path itself, or the newest of a run's folder, or of its folder of checkpoints."""
    if path.name.startswith("step-"):
        return [path]
    for folder in (path, path / CHECKPOINTS):
        if found := steps_of(folder):
            return found[:1]
    raise CheckpointError(
        f"--resume {path}: no checkpoint is there; give auto, a run's folder, or one of its checkpoints/step-N"
    )


def choose(run: Run, record: ResumableRecord) -> None:
    """Set a record's identity and origin: the first checkpoint that is whole. A collective.

    Raises:
        CheckpointError: none is whole, or ``--resume`` names one that is not; it is of another run; or it is of the
            run's last step. On every rank.
    """
    options, spec = record.options, run.training_spec
    if options is None or (options.resume is None and options.checkpoint_every is None):
        return
    record.identity = identity_of(run.name, spec, run.seed, run.precision)
    folder = record.folder
    found, auto, goes_on = broadcast_object(None if folder is None else (folder.found, folder.auto, folder.goes_on))
    problems: list[str] = []
    for path in found:
        manifest, problem = check_files(run, path)
        if problem is None:
            rows = manifest.state.get("rows", 0) if goes_on else 0
            record.origin = Origin(path, manifest, rows, auto)
            check_origin(record.origin, record.identity)
            if spec is not None:
                check_steps_left(record.origin, run.options, spec.steps)
            break
        if not auto or isinstance(problem, CheckpointError):
            raise CheckpointError(str(problem), on_every_rank=True)
        problems.append(problem)
        run.note(f"{problem}: the checkpoint before it is taken")
    if problems and record.origin is None:
        raise CheckpointError(f"no checkpoint is whole: {problems[0]}", on_every_rank=True)


def record_goes_on(prepared: RunFolder, origin: Origin | None, layout: str) -> Resume | None:
    """How the record goes on; None for one that begins."""
    there = any((prepared.outdir / name).exists() for name in (DATASET, JOURNAL))
    if origin is None and not (prepared.goes_on and there):
        return None
    rows, step = (origin.rows, origin.manifest.step) if origin else (0, 0)
    return Resume(rows, {"step": step, "layout": layout, "time": datetime.now(timezone.utc).isoformat("T", "seconds")})


def flags_that_go_on(outdir: Path, options: Any, steps: int) -> str:
    """The flags that make as many steps again, from the newest checkpoint, in the same record."""
    epochs = getattr(options, "epochs", None)
    more = f"--max_iters {2 * steps}"
    if epochs is not None and getattr(options, "max_iters", None) is None:
        more = f"--epochs {2 * epochs}"
    return f"--outdir {outdir} --resume auto {more}"


def below(path: Path) -> str:
    """A path, from the current folder if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
