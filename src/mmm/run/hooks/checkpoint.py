"""When a run saves, what it goes on from, and how a signal ends it."""

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

from mmm.checkpoint import Manifest, Saver
from mmm.checkpoint.manifest import remove_partial, steps_of
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.errors import CheckpointError, ConfigError
from mmm.history.record.attempts import this_attempt
from mmm.history.record.folder import DATASET, JOURNAL, versions, writable
from mmm.history.record.resume import Resume, check_over
from mmm.nn.draw import accum_dtype
from mmm.run.hook import Hook
from mmm.run.old_checkpoints import as_today
from mmm.run.options import check_resume, checkpoint_options, flags_of
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
from mmm.runtime.contract import ELASTIC_VARIABLE, SAVED_EXIT
from mmm.runtime.ranks import command_line
from mmm.runtime.stop import StopSignal, stop_signal
from mmm.units import counted

AUTO = Path("auto")


class Checkpoint(Hook):
    """Saves checkpoints, and resumes from one, as the flags of a run say.

    It comes before the record, which needs to know whether the run resumes.
    """

    def __init__(self, options: Any = None, metadata: ModelMetadata | None = None) -> None:
        """
        Args:
            options: the group ``checkpoint`` of the program's flags. None: the group that its config has, if any.
            metadata: what each checkpoint keeps of the model besides.
        """
        self.options = options
        self.metadata = metadata or ModelMetadata()
        self.flags: dict[str, Any] = {}
        self.every: int | None = None
        self.candidates: list[Path] = []
        self.goes_on_by_itself = False
        self.identity: dict[str, Any] = {}
        self.state_of_run: State | None = None
        self.saver: Saver | None = None
        self.vote: StopVote | None = None
        self._stopped = False
        self._has_looped = False
        self._was_described = False

    def before(self, run: Run) -> None:
        if self.options is None:
            self.options = checkpoint_options(run.config)
        options = self.options
        if options is None:
            return
        self.every = options.checkpoint_every
        options.check()
        check_resume(options, run.options)
        run.saves = self.every is not None
        self.flags = flags_of(run.config)
        run.closing_lines = self._closing_lines
        if run.saves:
            run.prepare_folder = _prepare_folder

    def meet(self, run: Run, store: dist.Store) -> None:
        if self.options is not None:
            agree(store, run.rank, {}, then=lambda: self._prepare(run))

    def _prepare(self, run: Run) -> None:
        """Find the checkpoints that the run may go on from. On rank 0.

        Raises:
            CheckpointError: there is no checkpoint where ``--resume`` says; or --outdir has checkpoints, and --resume
                was not given.
            ConfigError: `launch --elastic` is to go on from checkpoints, and there would be none, or not with this
                batch.
            RecordError: the folder holds a record that does not go on.
        """
        options = self.options
        _check_elastic(run, self.every)
        attempt = this_attempt()
        outdir = run.options.outdir
        folder = None if outdir is None else outdir.expanduser().absolute()
        own: list[Path] = []  # the checkpoints of this run's folder
        if folder is not None and (run.saves or options.resume is not None):
            own = steps_of(folder / CHECKPOINTS)
        is_second_attempt = attempt is not None and attempt.number > 0 and run.saves and folder is not None
        self.goes_on_by_itself = options.resume == AUTO
        if is_second_attempt and (own or options.resume is None):
            self.goes_on_by_itself = True
        if self.goes_on_by_itself:
            self.candidates = own
            run.keeps_record = True
        elif options.resume is not None:
            self.candidates = checkpoints_at(options.resume.expanduser().absolute())
            own_folders = [path.resolve().parent for path in own]
            run.keeps_record = self.candidates[0].resolve().parent in own_folders
            if run.keeps_record and self.candidates[0].name != own[0].name:
                raise CheckpointError(
                    f"--resume {self.candidates[0]}: {own[0].name} is newer, and the run's folder would have two "
                    "histories; give another --outdir, or remove the newer ones"
                )
        if run.keeps_record and folder is not None:
            check_over(folder, attempt, bool(self.candidates))
        elif own and run.saves:
            why = ""
            if run.options.overwrite:
                why = "--overwrite replaces the record and leaves checkpoints, which are costly; "
            raise CheckpointError(
                f"{own[0].parent} has checkpoints of an earlier run ({own[0].name} is the newest), and this one would "
                f"save among them: {why}give --resume auto to go on from there, another --outdir, or remove them"
            )

    def start(self, run: Run) -> None:
        if self.options is None or run.comm.dry or (self.options.resume is None and self.every is None):
            return
        self.identity = identity_of(run)
        candidates, auto, keeps_record = run.comm.broadcast((self.candidates, self.goes_on_by_itself, run.keeps_record))
        run.keeps_record = keeps_record
        run.origin = choose_origin(run, self.identity, candidates, auto)
        if run.origin is not None and run.job is not None and run.job.sizes is not None:
            check_steps_left(run.origin, self.flags, run.job.steps)  # before the model is made
        if run.outdir is not None and run.keeps_record:
            run.resume = _record_goes_on(run.outdir, run.origin, str(run.layout))
        if run.saves:
            self.vote = StopVote(run, run.exits.enter_context(stop_signal()))

    def state(self, run: Run) -> None:
        if self.options is None:
            return
        save_model = self.flags.get("save_model")
        if self.every is None and save_model is not None:
            run.log.info("%s", without_checkpoints(save_model))
        if run.comm.dry or (self.every is None and run.origin is None):
            return
        if self.state_of_run is not None:
            raise ConfigError("run.state(…) is called a second time: call it once, with all that the loop changes")
        self.state_of_run = state = State(run.objects)
        described, tensors = state.describe()
        if not state.has_stages:
            check_alike(run.comm, described, tensors)
        if self.every is not None:
            folder: Path = run.comm.broadcast(run.outdir)  # which rank 0 has made
            self.saver = Saver(
                folder / CHECKPOINTS, run.comm.new_group(), self.options.keep or 2, run.note, self.metadata
            )
            run.exits.callback(register_optimizer_step_pre_hook(self._refuse_forgotten).remove)
        if run.origin is not None:
            with damage(run.origin.path):
                self._load(run, state, run.origin, described, tensors)

    def _refuse_forgotten(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raises ConfigError where an optimizer of the loop is not saved, and would begin anew."""
        assert self.state_of_run is not None
        saved = [*self.state_of_run.optimizers.values()]
        for other in self.state_of_run.others.values():  # one of the program's own may have an optimizer in it
            if not isinstance(other, LRScheduler):
                saved += optimizers_in(getattr(other, "__dict__", None))
        if not any(value is optimizer for value in saved):
            raise ConfigError(
                f"run.state(…) lacks an optimizer of the loop, {article(optimizer)}: it would begin anew",
                on_every_rank=True,
            )

    def _load(
        self, run: Run, state: State, origin: Origin, here: Described, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Load a checkpoint. A collective. here, tensors: the objects of the run, as of `State.describe`."""
        manifest = origin.manifest
        saved = as_today(manifest.state, here)
        state.load(origin.path, manifest.files, saved["objects"], here, tensors, run.device)
        run.first = manifest.step
        saved_layout = manifest.about["layout"]
        has_moved = saved_layout != str(run.layout)
        run.so_far = _row_so_far(run, saved["row"], has_moved)
        suffix = f", saved on the layout {saved_layout}" if has_moved else ""
        run.note(f"resumed from {origin.path} at step {manifest.step}{suffix}")

    def begin(self, run: Run, step: Step) -> None:
        """A signal that has come to any rank makes this step the last, which is saved."""
        if self.vote is None or self.saver is None or self.every is None:
            return
        self._stopped = self.vote.stop_asked() and not step.last
        step.last = step.last or self._stopped
        step.saves = step.last or (step.number + 1) % self.every == 0
        step.due = step.due or (step.saves and step.ends_row)

    def finish(self, run: Run, step: Step) -> None:
        if self.saver is None:
            return
        assert self.state_of_run is not None
        if step.saves:
            self._save(run, self.state_of_run, step)
        elif not self._was_described:
            # Optimizers have what they keep from their first step on: what cannot be saved is refused now.
            self.state_of_run.describe()
        self._was_described = True
        self.saver.poll()
        if self._stopped:
            self._stop(run, step.number + 1)
        if step.last:
            self.saver.wait()

    def _save(self, run: Run, state: State, step: Step) -> None:
        """Begin to save. A collective."""
        assert self.saver is not None
        state.reshard()
        described, tensors = state.describe()
        in_full = state.others if state.has_stages else described
        check_alike(
            run.comm,
            {name: described[name] for name in in_full},
            {name: tensors[name] for name in state.others},
        )
        if state.has_stages:
            described = of_all_stages(run.comm, described)
        losses: list[float] = []
        if run.so_far.loss is not None:
            losses = run.comm.floats(run.so_far.loss.view(1).tolist(), run.device).flatten().tolist()
        row = {
            "steps": run.so_far.steps,
            "counted": float(run.so_far.counted),
            "losses": losses,
            "loss_ranks": run.layout.loss_ranks() if losses else [],
        }
        about = {"layout": str(run.layout), "command": command_line(), "versions": versions()}
        rows = 0
        if run.history is not None:
            run.history.flush()  # the rows that the checkpoint counts on, also where none ends with this step
            rows = len(run.history)
        saved = {"rows": rows, "samples": run.samples, "objects": described, "row": row}
        manifest = Manifest(step.number + 1, self.identity, saved, about, {})
        self.saver.save(state.tensors_to_save(tensors), manifest)
        if self.options.checkpoint_mode == "blocking":
            self.saver.wait()

    def _stop(self, run: Run, done: int) -> None:
        """End the run, which is saved as of so many steps. A collective."""
        assert self.saver is not None
        complete = self.saver.wait()
        saved = ""
        if complete:
            where = self.saver.folder.parent if run.options.outdir is None else "auto"
            saved = f", and saved: the same command with --resume {where} goes on from there"
        run.note(f"stopped by a signal after {counted(done, 'step')}{saved}")
        raise SystemExit(SAVED_EXIT if complete else 1)

    def loop(self, run: Run) -> None:
        """
        Raises:
            ConfigError: the program has not said what to save, or another loop of it is saved.
            CheckpointError: as `check_goes_on`.
        """
        if self.options is None or run.comm.dry or (self.every is None and run.origin is None):
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
            check_goes_on(run.origin, self.flags, run.total, run.samples)

    def _closing_lines(self, outdir: Path, done: int) -> list[str]:
        """Where the weights are, and the line that goes on from them."""
        checkpoints = steps_of(outdir / CHECKPOINTS)
        paths = [outdir / "model.pt", *checkpoints[:1]]
        files = [below(path) for path in paths if path.exists()]
        lines = [f"weights: {', '.join(files) if files else 'none are kept'}"]
        if checkpoints:
            lines.append(f"to go on: the same command with {flags_that_go_on(outdir, self.flags, done)}")
        return lines

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is not None or self.options is None:
            return
        if self.saver is not None:
            self.saver.wait()  # of a loop that was left before its end
        elif self.state_of_run is None and (self.options.resume or self.every) and not run.comm.dry:
            run.note("--resume and --checkpoint_every had no effect: the program has no run.state(…)")


def flags_that_go_on(outdir: Path, flags: Mapping[str, Any], steps: int) -> str:
    """The flags that make as many steps again, from the newest checkpoint, in the same record."""
    epochs = flags.get("epochs")
    more = f"--max_iters {2 * steps}"
    if epochs is not None and flags.get("max_iters") is None:
        more = f"--epochs {2 * epochs}"
    return f"--outdir {outdir} --resume auto {more}"


def below(path: Path) -> str:
    """A path, from the current folder if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _prepare_folder(outdir: Path) -> None:
    """Make the folder of checkpoints, and remove what a killed run has left there. Raises RecordError."""
    writable(outdir / CHECKPOINTS)
    remove_partial(outdir / CHECKPOINTS)


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
        self._asked: tuple[Tensor, Any] | None = None  # of the step before, on the host once the event has come

    def stop_asked(self) -> bool:
        """Ask all ranks. A collective.

        On CUDA and XPU the host is ahead of the device. There the answer is the one of the step before: the host waits
        for that step alone.
        """
        came = torch.full((1,), float(self.signal.came is not None), device=self.run.device)  # no copy to wait for
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
    """Raises ConfigError where `launch --elastic` could not go on from this run's checkpoints."""
    needed = {
        "checkpoint_every": every,
        "outdir": run.options.outdir,
        "global_batch_size": run.options.global_batch_size,
    }
    missing = [f"--{name}" for name, value in needed.items() if value is None]
    if missing and ELASTIC_VARIABLE in os.environ:
        raise ConfigError(
            f"launch --elastic: to go on with another number of ranks {run.name} needs {' and '.join(missing)} as well"
        )


def _record_goes_on(outdir: Path, origin: Origin | None, layout: str) -> Resume | None:
    """How the record goes on; None for one that begins."""
    has_record = any((outdir / name).exists() for name in (DATASET, JOURNAL))
    if origin is None and not has_record:
        return None
    rows = origin.rows if origin else 0
    step = origin.manifest.step if origin else 0
    time = datetime.now(timezone.utc).isoformat("T", "seconds")
    return Resume(rows, {"step": step, "layout": layout, "time": time})


def _row_so_far(run: Run, saved: dict[str, Any], has_moved: bool) -> RowSoFar:
    """This rank's part of the row under way, such as an epoch's."""
    losses = saved["losses"]
    if not losses:
        return RowSoFar()
    if not has_moved:
        local = losses[run.rank.rank]
    elif run.rank.rank == run.layout.loss_ranks()[0]:
        # The losses that add up to the global loss: on another layout one rank has them all.
        local = sum(losses[rank] for rank in saved["loss_ranks"])
    else:
        local = 0.0
    local_loss = torch.tensor(local, dtype=accum_dtype(run.device), device=run.device)
    return RowSoFar(saved["steps"], saved["counted"], local_loss)


def without_checkpoints(save_model: bool) -> str:
    """What a run that saves no checkpoint leaves of its weights, and the flag for more; said before its first step."""
    flag = "--checkpoint_every N (of a large N: one, at the end)"
    if save_model:
        return (
            "this run will leave model.pt, which plain PyTorch loads, and no checkpoint, which --resume reads, and "
            f"of a language model mmm sample, mmm export and --init_from; {flag} leaves those"
        )
    return f"this run will leave no weights; {flag} leaves checkpoints, and --save_model what plain PyTorch loads"
