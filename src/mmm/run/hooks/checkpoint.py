"""When a run saves, what it resumes from, and how a signal ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmm.checkpoint.manifest import Manifest, steps_of
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.saver import Saver
from mmm.errors import CheckpointError, ConfigError
from mmm.history.record.attempts import this_attempt
from mmm.history.record.folder import DATASET, JOURNAL, versions
from mmm.history.record.resume import Resume, check_over
from mmm.nn.draw import accum_dtype
from mmm.run.hook import Hook
from mmm.run.old_checkpoints import as_today
from mmm.run.options import check_resume, checkpoint_options
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
from mmm.run.state import Described, State, article, check_alike, of_all_stages
from mmm.run.step import Step
from mmm.runtime.agreement import agree
from mmm.runtime.clock import event_class
from mmm.runtime.ranks import command_line
from mmm.runtime.stop import StopSignal, stop_signal
from mmm.units import counted
from mmm_launch.contract import ELASTIC_VARIABLE, SAVED_EXIT

# The value of --resume that takes the newest whole checkpoint of --outdir.
AUTO = Path("auto")
# Number of checkpoints that stay without --keep.
DEFAULT_KEEP = 2


class Checkpoint(Hook):
    """Saves checkpoints, and resumes from one, as the flags of a run say.

    It comes before the record, which needs to know whether the run resumes.

    Attributes:
        options: the group ``checkpoint`` of the program's flags. None: the program has no such flags.
        metadata: what each checkpoint keeps of the model, besides its tensors.
        every: number of steps between two checkpoints. None: nothing is saved.
        candidates: checkpoints that the run may resume from, the best first; on rank 0.
        resumes_by_itself: whether the run takes the newest whole checkpoint, or begins if there is none; on rank 0.
        identity: what has to be the same for a run to resume, as a checkpoint keeps it.
        state_of_run: the objects of ``run.state(…)``.
        saver: writes checkpoints.
        vote: asks all ranks whether a signal to stop has come.
    """

    def __init__(self, options: Any = None, metadata: ModelMetadata | None = None) -> None:
        """
        Args:
            options: the group ``checkpoint`` of the program's flags. None: the group that its config has, if any.
            metadata: what each checkpoint keeps of the model, besides its tensors.
        """
        self.options = options
        self.metadata = metadata or ModelMetadata()
        self.every: int | None = None
        self.candidates: list[Path] = []
        self.resumes_by_itself = False
        self.identity: dict[str, Any] = {}
        self.state_of_run: State | None = None
        self.saver: Saver | None = None
        self.vote: StopVote | None = None
        # Whether a signal has made the current step the last one.
        self._stopped = False
        self._has_looped = False
        # Number of finished steps.
        self._done = 0
        # Whether the state was described after a step.
        self._was_described = False

    def before(self, run: Run) -> None:
        if self.options is None:
            self.options = checkpoint_options(run.config)
        options = self.options
        if options is None:
            return
        self.every = options.checkpoint_every
        # A user's own program may have made the options without a command line.
        options.check()
        check_resume(options, run.options)
        run.saves = self.every is not None

    def meet(self, run: Run, store: dist.Store) -> None:
        if self.options is not None:
            agree(store, run.rank, {}, then=lambda: self._prepare(run))

    def _prepare(self, run: Run) -> None:
        """Find the checkpoints that the run may resume from. On rank 0.

        Raises:
            CheckpointError: there is no checkpoint where ``--resume`` says; or --outdir has checkpoints, and --resume
                was not given.
            ConfigError: `launch --elastic` has to resume from checkpoints, and there would be none, or not with this
                batch.
            RecordError: the record in the folder cannot be continued.
        """
        options = self.options
        _check_elastic(run, self.every)
        attempt = this_attempt()
        folder: Path | None = None
        # The checkpoints of this run's folder, the newest first.
        own: list[Path] = []
        if run.options.outdir is not None:
            folder = run.options.outdir.expanduser().absolute()
            if run.saves or options.resume is not None:
                own = steps_of(folder / CHECKPOINTS)
        # `launch --retries` starts the same command line again, which need not have --resume. If it has, that counts as
        # long as this run has no checkpoint of its own.
        is_retry = attempt is not None and attempt.retries > 0
        self.resumes_by_itself = options.resume == AUTO
        has_place = run.saves and folder is not None
        if is_retry and has_place and (own or options.resume is None):
            self.resumes_by_itself = True
        if self.resumes_by_itself:
            self.candidates = own
            run.keeps_record = True
        elif options.resume is not None:
            self.candidates = checkpoints_at(options.resume.expanduser().absolute())
            chosen = self.candidates[0]
            own_folders = [path.resolve().parent for path in own]
            run.keeps_record = chosen.resolve().parent in own_folders
            if run.keeps_record and chosen.name != own[0].name:
                raise CheckpointError(
                    f"--resume {chosen}: {own[0].name} is newer, and the run's folder would have two histories; give "
                    "another --outdir, or remove the newer ones"
                )
        if run.keeps_record and folder is not None:
            check_over(folder, attempt, bool(self.candidates))
        elif own and run.saves:
            why = ""
            if run.options.overwrite:
                why = "--overwrite replaces the record and leaves checkpoints, which are costly; "
            raise CheckpointError(
                f"{own[0].parent} has checkpoints of an earlier run ({own[0].name} is the newest), and this one would "
                f"save among them: {why}give --resume auto to continue from there, another --outdir, or remove them"
            )

    def start(self, run: Run) -> None:
        if self.options is None or run.comm.dry:
            return
        if self.options.resume is None and self.every is None:
            return
        self.identity = identity_of(run)
        # Only rank 0 has looked into the folder.
        known = (self.candidates, self.resumes_by_itself, run.keeps_record)
        candidates, auto, run.keeps_record = run.comm.broadcast(known)
        run.origin = choose_origin(run, self.identity, candidates, auto)
        # A trainer knows its number of steps: refuse before the model is made.
        if run.origin is not None and run.job is not None and run.job.sizes is not None:
            check_steps_left(run.origin, run.flags, run.job.steps)
        if run.outdir is not None and run.keeps_record:
            run.resume = _resumed_record(run.outdir, run.origin, str(run.layout))
        if run.saves:
            self.vote = StopVote(run, run.exits.enter_context(stop_signal()))

    def state(self, run: Run) -> None:
        if self.options is None:
            return
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
            folder: Path = run.comm.broadcast(run.outdir)
            keep = self.options.keep or DEFAULT_KEEP
            # Checkpoints are written in the background, so they have a process group for themselves.
            group = run.comm.new_group()
            self.saver = Saver(folder / CHECKPOINTS, group, keep, run.note, self.metadata)
            run.exits.callback(register_optimizer_step_pre_hook(self._refuse_forgotten).remove)
        if run.origin is not None:
            with damage(run.origin.path):
                self._load(run, state, run.origin, described, tensors)

    def _is_used(self, run: Run) -> bool:
        """Whether the run saves checkpoints, or resumes from one."""
        saves_or_resumes = self.every is not None or run.origin is not None
        return saves_or_resumes and not run.comm.dry

    def _refuse_forgotten(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Called before any optimizer of the process steps.

        Raises:
            ConfigError: an optimizer of the loop, or a group of its parameters, is not saved: it would begin anew.
        """
        state = self.state_of_run
        assert state is not None
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

    def _load(
        self,
        run: Run,
        state: State,
        origin: Origin,
        current: Described,
        current_tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Load a checkpoint. A collective.

        Args:
            current, current_tensors: the objects of the run, as `State.describe` has returned them.
        """
        manifest = origin.manifest
        saved = as_today(manifest.state, current)
        state.load(origin.path, manifest.files, saved["objects"], current, current_tensors, run.device)
        run.first = manifest.step
        saved_layout = manifest.about["layout"]
        has_moved = saved_layout != str(run.layout)
        run.so_far = _row_so_far(run, saved["row"], has_moved)
        suffix = f", saved on the layout {saved_layout}" if has_moved else ""
        run.note(f"resumed from {origin.path} at step {manifest.step}{suffix}")

    def begin(self, run: Run, step: Step) -> None:
        """Decide whether the step is saved. A signal on any rank makes it the last one. A collective."""
        if self.vote is None or self.saver is None or self.every is None:
            return
        self._stopped = self.vote.stop_asked() and not step.last
        if self._stopped:
            step.last = True
        n_steps = step.index + 1
        step.saves = step.last or n_steps % self.every == 0
        # A checkpoint counts on the rows before it, so the row of its step is written first.
        if step.saves and step.ends_row:
            step.due = True

    def finish(self, run: Run, step: Step) -> None:
        self._done = step.index + 1
        if self.saver is None:
            return
        assert self.state_of_run is not None
        if step.saves:
            self._save(run, self.state_of_run, step)
        elif not self._was_described:
            # Optimizers have their state from the first step on: what cannot be saved is refused now.
            self.state_of_run.describe()
        self._was_described = True
        self.saver.poll()
        if self._stopped:
            self._stop(run, step.index + 1)
        if step.last:
            self.saver.wait()

    def _save(self, run: Run, state: State, step: Step) -> None:
        """Begin to save. A collective."""
        assert self.saver is not None
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
        losses: list[float] = []
        loss_ranks: list[int] = []
        # A row is under way, such as an epoch's.
        if run.so_far.loss is not None:
            local_loss = run.so_far.loss.view(1).tolist()
            # (ranks, 1)
            by_rank = run.comm.floats(local_loss, run.device)
            losses = by_rank.flatten().tolist()
            loss_ranks = run.layout.loss_ranks()
        row = {
            "steps": run.so_far.steps,
            "counted": float(run.so_far.counted),
            "losses": losses,
            "loss_ranks": loss_ranks,
        }
        about = {
            "layout": str(run.layout),
            "command": command_line(),
            "versions": versions(),
        }
        rows = 0
        if run.history is not None:
            # The checkpoint counts on these rows, also if no row ends with this step.
            run.history.flush()
            rows = len(run.history)
        saved = {
            "rows": rows,
            "samples": run.samples,
            "objects": described,
            "row": row,
        }
        manifest = Manifest(step.index + 1, self.identity, saved, about, {})
        self.saver.save(state.tensors_to_save(tensors), manifest)
        if self.options.checkpoint_mode == "blocking":
            self.saver.wait()

    def _stop(self, run: Run, done: int) -> None:
        """End the run, which has been saved after so many steps. A collective."""
        assert self.saver is not None
        complete = self.saver.wait()
        saved = ""
        if complete:
            where = self.saver.folder.parent if run.options.outdir is None else AUTO
            saved = f", and saved: the same command with --resume {where} continues from there"
        run.note(f"stopped by a signal after {counted(done, 'step')}{saved}")
        raise SystemExit(SAVED_EXIT if complete else 1)

    def loop(self, run: Run) -> None:
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
        if self._has_looped:
            raise ConfigError(f"{flags}: another loop of the run is saved already")
        self._has_looped = True
        if run.origin is not None:
            check_goes_on(run.origin, run.flags, run.total, run.samples)

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is not None or self.options is None:
            return
        is_asked = self.options.resume or self.every
        if self.saver is not None:
            # The loop may have been left before its last step.
            self.saver.wait()
        elif is_asked and self.state_of_run is None and not run.comm.dry:
            run.note("--resume and --checkpoint_every had no effect: the program has no run.state(…)")
        if run.outdir is not None and self._done > 1:
            say_what_is_left(run, run.outdir, self._done)


def say_what_is_left(run: Run, outdir: Path, done: int) -> None:
    """Log where the weights are, and the flags that continue from them.

    Args:
        done: number of finished steps.
    """
    checkpoints = steps_of(outdir / CHECKPOINTS)
    paths = [outdir / "model.pt", *checkpoints[:1]]
    files = [below(path) for path in paths if path.exists()]
    run.log.info("weights: %s", ", ".join(files) or "none are kept")
    if checkpoints:
        more = more_steps(run.flags, done)
        run.log.info("to continue: the same command with --outdir %s --resume auto %s", outdir, more)


def more_steps(flags: Mapping[str, Any], done: int) -> str:
    """The flag that makes as many steps again. A user's own program may have one for its steps under another name."""
    epochs = flags.get("epochs")
    if epochs is not None and flags.get("max_iters") is None:
        return f"--epochs {2 * epochs}"
    for name, value in flags.items():
        if name == "max_iters" or (name == "steps" and value == done):
            return f"--{name} {2 * done}"
    return "and more steps"


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


def _resumed_record(outdir: Path, origin: Origin | None, layout: str) -> Resume | None:
    """How the record of the folder is continued. None: it begins."""
    has_record = any((outdir / name).exists() for name in (DATASET, JOURNAL))
    if origin is None and not has_record:
        return None
    # Without a checkpoint the run begins anew, and none of the rows stays.
    rows = 0
    step = 0
    if origin is not None:
        rows = origin.rows
        step = origin.manifest.step
    time = datetime.now(timezone.utc).isoformat("T", "seconds")
    return Resume(rows, {"step": step, "layout": layout, "time": time})


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
