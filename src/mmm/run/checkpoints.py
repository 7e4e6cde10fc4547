"""When a run saves, what it resumes from, and how a signal ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmm.checkpoint.manifest import Manifest, remove_partial, steps_of
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.saver import Saver
from mmm.errors import CheckpointError, ConfigError
from mmm.history.record.attempts import this_attempt
from mmm.history.record.folder import DATASET, JOURNAL, versions, writable
from mmm.history.record.resume import Resume, check_over
from mmm.nn.init import accum_dtype
from mmm.run.hook import Loop
from mmm.run.options import CheckpointFlags, check_resume
from mmm.run.origin import (
    CHECKPOINTS,
    Origin,
    check_goes_on,
    check_steps_left,
    checkpoints_at,
    choose_origin,
    damage,
    identity_of,
)
from mmm.run.rows import RowSoFar
from mmm.run.run import Run
from mmm.run.state import State, article, check_alike, of_all_stages
from mmm.run.step import Step
from mmm.runtime.clock import event_class
from mmm.runtime.ranks import command_line
from mmm.runtime.stop import StopSignal, stop_signal
from mmm.units import counted
from mmm_launch.contract import ELASTIC_VARIABLE, SAVED_EXIT

# The value of --resume that takes the newest whole checkpoint of --outdir.
AUTO = Path("auto")
# Number of checkpoints that stay without --keep.
DEFAULT_KEEP = 2


class Checkpoints:
    """Saves checkpoints, and resumes from one, as the flags of a run say. `mmm.run.folder.Folder` calls it.

    Attributes:
        options: the group ``checkpoint`` of the program's flags.
        metadata: what each checkpoint keeps of the model, besides its tensors.
        every: number of steps between two checkpoints. None: nothing is saved.
        candidates: checkpoints that the run may resume from, the best first; on rank 0.
        resumes_by_itself: whether the run takes the newest whole checkpoint, or begins if there is none; on rank 0.
        keeps_record: whether the rows that are already in the folder stay.
        origin: the checkpoint that the run resumes from. None: it starts from the beginning.
        identity: what has to be the same for a run to resume, as a checkpoint keeps it.
        state_of_run: the objects of ``run.state(…)``.
        saver: writes checkpoints.
        vote: asks all ranks whether a signal to stop has come.
        is_stopped: whether a signal has made the current step the last one.
    """

    def __init__(self, options: CheckpointFlags, metadata: ModelMetadata | None = None) -> None:
        self.options = options
        self.metadata = metadata or ModelMetadata()
        self.every = options.checkpoint_every
        self.candidates: list[Path] = []
        self.resumes_by_itself = False
        self.keeps_record = False
        self.origin: Origin | None = None
        self.identity: dict[str, Any] = {}
        self.state_of_run: State | None = None
        self.saver: Saver | None = None
        self.vote: StopVote | None = None
        self.is_stopped = False
        self._loop: Loop | None = None
        # Number of finished steps.
        self._done = 0
        # Whether the state was described after a step.
        self._was_described = False

    def check(self, run: Run) -> None:
        """Raises ConfigError for flags that do not fit."""
        # A user's own program may have made the options without a command line.
        self.options.check()
        check_resume(self.options, run.options)

    def find(self, run: Run) -> bool:
        """Find the checkpoints that the run may resume from. On rank 0.

        Returns:
            Whether the record that is in the folder stays.

        Raises:
            CheckpointError: there is no checkpoint where ``--resume`` says; or --outdir has checkpoints, and --resume
                was not given.
            ConfigError: `launch --elastic` has to resume from checkpoints, and there would be none, or not with this
                batch.
            RecordError: the record in the folder cannot be continued.
        """
        _check_elastic(run, self.every)
        options = self.options
        attempt = this_attempt()
        folder: Path | None = None
        # The checkpoints of this run's folder, the newest first.
        own: list[Path] = []
        if run.options.outdir is not None:
            folder = run.options.outdir.expanduser().absolute()
            if self.every is not None or options.resume is not None:
                own = steps_of(folder / CHECKPOINTS)
        # `launch --retries` starts the same command line again, which need not have --resume. If it has, that counts as
        # long as this run has no checkpoint of its own.
        is_retry = attempt is not None and attempt.retries > 0
        has_place = self.every is not None and folder is not None
        goes_on = is_retry and has_place and (bool(own) or options.resume is None)
        self.resumes_by_itself = goes_on or options.resume == AUTO
        if self.resumes_by_itself:
            self.candidates = own
            self.keeps_record = True
        elif options.resume is not None:
            self.candidates = checkpoints_at(options.resume.expanduser().absolute())
            chosen = self.candidates[0]
            own_folders = [path.resolve().parent for path in own]
            self.keeps_record = chosen.resolve().parent in own_folders
            if self.keeps_record and chosen.name != own[0].name:
                raise CheckpointError(
                    f"--resume {chosen}: {own[0].name} is newer, and the run's folder would have two histories; give "
                    "another --outdir, or remove the newer ones"
                )
        if self.keeps_record and folder is not None:
            check_over(folder, attempt, bool(self.candidates))
        elif own and self.every is not None:
            why = ""
            if run.options.overwrite:
                why = "--overwrite replaces the record and leaves checkpoints, which are costly; "
            raise CheckpointError(
                f"{own[0].parent} has checkpoints of an earlier run ({own[0].name} is the newest), and this one would "
                f"save among them: {why}give --resume auto to continue from there, another --outdir, or remove them"
            )
        return self.keeps_record

    def make_folder(self, outdir: Path) -> None:
        """Make the folder of the checkpoints, if there will be some. On rank 0."""
        if self.every is not None:
            # What a killed run was writing.
            remove_partial(writable(outdir / CHECKPOINTS))

    def start(self, run: Run, exits: ExitStack) -> None:
        """Choose the checkpoint that the run resumes from, and wait for signals from now on. A collective.

        Args:
            exits: what is closed once all is written.
        """
        is_asked = self.every is not None or self.options.resume is not None
        if run.comm.dry or not is_asked:
            return
        self.identity = identity_of(run)
        # Only rank 0 has looked into the folder.
        known = (self.candidates, self.resumes_by_itself, self.keeps_record)
        candidates, auto, self.keeps_record = run.comm.broadcast(known)
        self.origin = choose_origin(run, self.identity, candidates, auto, self.keeps_record)
        # A trainer knows its number of steps: refuse before the model is made.
        if self.origin is not None and run.job is not None and run.job.sizes is not None:
            check_steps_left(self.origin, run.job.steps)
        if self.every is not None:
            self.vote = StopVote(run, exits.enter_context(stop_signal()))
            exits.callback(register_optimizer_step_pre_hook(self._refuse_forgotten).remove)

    def continued_record(self, run: Run, outdir: Path) -> Resume | None:
        """How the record that is in the folder is continued. None: it begins."""
        has_record = any((outdir / name).exists() for name in (DATASET, JOURNAL))
        if not self.keeps_record or (self.origin is None and not has_record):
            return None
        # Without a checkpoint the run begins anew, and none of the rows stays.
        rows = 0
        step = 0
        if self.origin is not None:
            rows = self.origin.rows
            step = self.origin.manifest.step
        time = datetime.now(timezone.utc).isoformat("T", "seconds")
        return Resume(rows, {"step": step, "layout": str(run.layout), "time": time})

    def state(self, run: Run, outdir: Path | None) -> None:
        """Check the objects of ``run.state(…)``, and load the checkpoint into them. A collective."""
        save_model = run.flags.get("save_model")
        if self.every is None and save_model is not None:
            run.log.info("%s", without_checkpoints(save_model))
        if not self._is_used(run):
            return
        if self.state_of_run is not None:
            raise ConfigError("run.state(…) is called a second time: call it once, with all that the loop changes")
        state = State(run.objects)
        self.state_of_run = state
        described, tensors = state.describe()
        # The stages of a pipeline have different layers.
        if not state.has_stages:
            check_alike(run.comm, described, tensors)
        if self.every is not None:
            # Only rank 0 knows the folder: it has made it.
            folder: Path = run.comm.broadcast(outdir)
            keep = self.options.keep or DEFAULT_KEEP
            # Checkpoints are written in the background, so they have a process group for themselves.
            group = run.comm.new_group()
            self.saver = Saver(folder / CHECKPOINTS, group, keep, run.note, self.metadata)
        if self.origin is None:
            return
        manifest = self.origin.manifest
        with damage(self.origin.path):
            saved = manifest.state
            state.load(self.origin.path, manifest.files, saved["objects"], described, tensors, run.device)
            run.first = manifest.step
            saved_layout = manifest.about["layout"]
            has_moved = saved_layout != str(run.layout)
            run.so_far = _row_so_far(run, saved["row"], has_moved)
        suffix = f", saved on the layout {saved_layout}" if has_moved else ""
        run.note(f"resumed from {self.origin.path} at step {manifest.step}{suffix}")

    def _is_used(self, run: Run) -> bool:
        """Whether the run saves checkpoints, or resumes from one."""
        saves_or_resumes = self.every is not None or self.origin is not None
        return saves_or_resumes and not run.comm.dry

    def _refuse_forgotten(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Called before any optimizer of the process steps.

        Raises:
            ConfigError: an optimizer of the loop, or a group of its parameters, is not saved: it would begin anew.
        """
        state = self.state_of_run
        # Before `run.state(…)`.
        if state is None:
            return
        for name, saved_optimizer in state.optimizers.items():
            if saved_optimizer is optimizer:
                state.check_groups(name, optimizer)
                return
        # An object of the program's own may have an optimizer in it.
        for other in state.others.values():
            if isinstance(other, LRScheduler):
                continue
            for saved_optimizer in optimizers_in(getattr(other, "__dict__", None)):
                if saved_optimizer is optimizer:
                    return
        raise ConfigError(
            f"run.state(…) lacks an optimizer of the loop, {article(optimizer)}: it would begin anew",
            on_every_rank=True,
        )

    def loop(self, run: Run, loop: Loop) -> None:
        """
        Raises:
            ConfigError: the program has not said what to save, or another loop of it is saved.
            CheckpointError: as `check_goes_on`.
        """
        if not self._is_used(run):
            return
        flags = "--resume and --checkpoint_every"
        if self.state_of_run is None:
            raise ConfigError(
                f"{flags}: the program has no run.state(…) before its loop: call run.state(model=…, optimizer=…), with "
                "what else the loop changes"
            )
        if self._loop is not None:
            raise ConfigError(f"{flags}: another loop of the run is saved already")
        self._loop = loop
        if self.origin is not None:
            check_goes_on(self.origin, loop.steps, loop.samples)

    def begin(self, step: Step) -> None:
        """Decide whether the step is saved. A signal on any rank makes it the last one. A collective."""
        if self.vote is None or self.saver is None or self.every is None:
            return
        self.is_stopped = self.vote.stop_asked() and not step.last
        if self.is_stopped:
            step.last = True
        n_steps = step.index + 1
        step.saves = step.last or n_steps % self.every == 0
        # A checkpoint counts on the rows before it, so the row of its step is written first.
        if step.saves and step.ends_row:
            step.due = True

    def save(self, run: Run, step: Step, n_rows: int) -> None:
        """Begin to save. A collective.

        Args:
            n_rows: number of rows of the record up to this step.
        """
        state = self.state_of_run
        assert state is not None
        assert self.saver is not None
        assert self._loop is not None
        state.reshard()
        described, tensors = state.describe()
        # Of a pipeline, only the other objects are the same on all ranks.
        in_full = state.others if state.has_stages else described
        check_alike(
            run.comm,
            {name: described[name] for name in in_full},
            {name: tensors[name] for name in state.others},
        )
        if state.has_stages:
            described = of_all_stages(run.comm, described)
        about = {
            "layout": str(run.layout),
            "command": command_line(),
            "versions": versions(),
        }
        saved = {
            "rows": n_rows,
            "samples": self._loop.samples,
            "objects": described,
            "row": _saved_row(run),
        }
        manifest = Manifest(step.index + 1, self.identity, saved, about, {})
        self.saver.save(state.tensors_to_save(tensors), manifest)
        if self.options.checkpoint_mode == "blocking":
            self.saver.wait()

    def finish(self, step: Step) -> None:
        """The step is over, and its save has begun."""
        self._done = step.index + 1
        if self.saver is None or self.state_of_run is None:
            return
        if not (step.saves or self._was_described):
            # Optimizers have their state from the first step on: what cannot be saved is refused now.
            self.state_of_run.describe()
        self._was_described = True
        self.saver.poll()
        if step.last:
            self.saver.wait()

    def stop(self, run: Run, step: Step) -> None:
        """End the run, which a signal has asked for, and whose last step was saved. A collective."""
        assert self.saver is not None
        complete = self.saver.wait()
        saved = ""
        if complete:
            where = self.saver.folder.parent if run.options.outdir is None else AUTO
            saved = f", and saved: the same command with --resume {where} continues from there"
        run.note(f"stopped by a signal after {counted(step.index + 1, 'step')}{saved}")
        raise SystemExit(SAVED_EXIT if complete else 1)

    def end(self, run: Run, outdir: Path | None) -> None:
        """Wait for the last save, and say what is left of the run, which has finished."""
        is_asked = self.options.resume or self.every
        if self.saver is not None:
            # The loop may have been left before its last step.
            self.saver.wait()
        elif is_asked and self.state_of_run is None and not run.comm.dry:
            run.note("--resume and --checkpoint_every had no effect: the program has no run.state(…)")
        if outdir is not None and self._done > 1:
            say_what_is_left(run, outdir)


def say_what_is_left(run: Run, outdir: Path) -> None:
    """Log where the weights are, and the flags that continue from them."""
    checkpoints = steps_of(outdir / CHECKPOINTS)
    paths = [outdir / "model.pt", *checkpoints[:1]]
    files = [below(path) for path in paths if path.exists()]
    run.log.info("weights: %s", ", ".join(files) or "none are kept")
    if checkpoints:
        run.log.info("to continue: the same command with more steps, --outdir %s --resume auto", outdir)


def below(path: Path) -> str:
    """A path, relative to the current folder if it is below that."""
    current = Path.cwd()
    if path.is_relative_to(current):
        path = path.relative_to(current)
    return str(path)


def optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in lists, tuples and dicts."""
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, dict):
        yield from optimizers_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from optimizers_in(item)


class StopVote:
    """Whether a signal to stop has come to any rank."""

    def __init__(self, run: Run, signal: StopSignal) -> None:
        self.run = run
        self.signal = signal
        self._event = event_class(run.device)
        # The answer of the step before. It is on the host once the event has come.
        self._asked: tuple[Tensor, Any] | None = None

    def stop_asked(self) -> bool:
        """Ask all ranks. A collective.

        On CUDA and XPU the host is ahead of the device. There the answer is that of the step before, so that the host
        waits only for that step.
        """
        # Made on the device, so that there is no copy to wait for.
        has_come = float(self.signal.came is not None)
        came = torch.full((1,), has_come, device=self.run.device)
        self.run.comm.largest(came)
        if self._event is None:
            return bool(came.item())
        on_host = came.to("cpu", non_blocking=True)
        ready = self._event()
        ready.record()
        before = self._asked
        self._asked = (on_host, ready)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].item())


def _check_elastic(run: Run, every: int | None) -> None:
    """Raises ConfigError if `launch --elastic` could not resume from this run's checkpoints."""
    needed = {
        "checkpoint_every": every,
        "outdir": run.options.outdir,
        "global_batch_size": run.options.global_batch_size,
    }
    missing = [f"--{name}" for name, value in needed.items() if value is None]
    if missing and ELASTIC_VARIABLE in os.environ:
        raise ConfigError(
            f"launch --elastic: to resume with another number of ranks {run.name} needs {' and '.join(missing)} as well"
        )


def _saved_row(run: Run) -> dict[str, Any]:
    """The row that is under way, such as an epoch's, as a checkpoint has it. A collective."""
    losses: list[float] = []
    loss_ranks: list[int] = []
    if run.so_far.loss is not None:
        local_loss = run.so_far.loss.view(1).tolist()
        # (ranks, 1)
        by_rank = run.comm.floats(local_loss, run.device)
        losses = by_rank.flatten().tolist()
        loss_ranks = run.layout.loss_ranks()
    return {
        "steps": run.so_far.steps,
        "counted": float(run.so_far.counted),
        "losses": losses,
        "loss_ranks": loss_ranks,
    }


def _row_so_far(run: Run, saved: dict[str, Any], has_moved: bool) -> RowSoFar:
    """This rank's part of the row that the checkpoint has under way, such as an epoch's.

    Args:
        saved: the row in the checkpoint.
        has_moved: whether the checkpoint was saved on another layout.
    """
    losses = saved["losses"]
    if not losses:
        return RowSoFar()
    if not has_moved:
        local = losses[run.rank.rank]
    elif run.rank.rank == run.layout.loss_ranks()[0]:
        # Only the sum over the ranks counts, so on another layout one rank takes all of it.
        local = sum(losses[rank] for rank in saved["loss_ranks"])
    else:
        local = 0.0
    local_loss = torch.tensor(local, dtype=accum_dtype(run.device), device=run.device)
    return RowSoFar(saved["steps"], saved["counted"], local_loss)


def without_checkpoints(save_model: bool) -> str:
    """What a run that saves no checkpoint leaves of its weights, and the flag for more. Said before its first step."""
    flag = "--checkpoint_every N (with a large N: one, at the end)"
    if save_model:
        return (
            "this run will leave model.pt, which plain PyTorch loads, and no checkpoint, which --resume reads, and "
            f"with a language model mmm sample, mmm export and --init_from; {flag} leaves those"
        )
    return f"this run will leave no weights; {flag} leaves checkpoints, and --save_model what plain PyTorch loads"
