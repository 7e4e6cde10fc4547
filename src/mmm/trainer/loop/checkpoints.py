"""The checkpoints of the training loop: what a step needs to be made again, and when it is saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.checkpoint import Manifest, Saver, load_tensors, training_state
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.contract import SAVED_EXIT
from mmm.history.record.folder import versions
from mmm.models.draw import accum_dtype
from mmm.parallel.footprint import STATE
from mmm.parallel.grad_scaler import GradScaler
from mmm.parallel.optimizer import learning_rate
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.clock import event_class
from mmm.runtime.process_group import broadcast_object, gather_floats
from mmm.runtime.ranks import command_line
from mmm.trainer.config.training import CheckpointOptions
from mmm.trainer.run.core import Run
from mmm.trainer.run.resume import CHECKPOINTS, ResumableRecord


def without_checkpoints(options: CheckpointOptions) -> str:
    """What a run that saves no checkpoint leaves of its weights, and the flag for more; said before its first step."""
    flag = "--checkpoint_every N (of a large N: one, at the end)"
    if options.save_model:
        return (
            "this run will leave model.pt, which plain PyTorch loads, and no checkpoint, which --resume reads, and "
            f"of a language model mmm sample, mmm export and --init_from; {flag} leaves those"
        )
    return f"this run will leave no weights; {flag} leaves checkpoints, and --save_model what plain PyTorch loads"


class RowSoFar(NamedTuple):
    """The row under way.

    Attributes:
        steps: in it.
        counted: those that were not skipped, on the device where steps may be.
        loss: this rank's, summed over them; None before the first.
    """

    steps: int = 0
    counted: float | Tensor = 0
    loss: Tensor | None = None

    def with_step(self, loss: Tensor, skip: Tensor | None) -> RowSoFar:
        """With one step more.

        Args:
            skip: 1.0 where it was skipped, and then does not count; None: it counts.
        """
        if skip is not None:
            loss = loss.where(skip == 0, 0)
        return RowSoFar(
            self.steps + 1,
            self.counted + (1 if skip is None else 1 - skip),
            loss if self.loss is None else self.loss + loss,
        )

    def mean(self) -> Tensor:
        """This rank's loss, of a row with a step."""
        assert self.loss is not None
        return self.loss / self.counted


class Checkpoints:
    """Of a run on any layout: does nothing without ``--checkpoint_every`` and ``--resume``.

    A step needs parameters, saved buffers, the optimizer's state, fp16's scale, and its number: batches, learning rate
    and random generators (`mmm.runtime.seed.seed_step`) are functions of seed and step. A row over many steps needs
    the losses so far as well.
    """

    def __init__(
        self,
        run: Run,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        metadata: ModelMetadata,
        options: CheckpointOptions,
    ) -> None:
        self.options = options
        self.run, self.model, self.optimizer, self.scaler = run, model, optimizer, scaler
        record = run.hook(ResumableRecord)
        assert record is not None, "the hooks of a program with checkpoints have none that resumes"
        self.record = record
        self.parameters: dict[str, Tensor] = {}
        self.repeated: list[tuple[str, Tensor]] = []  # of a tied weight that this rank has in two stages
        for name, parameter in model.named_parameters():
            if self.parameters.setdefault(name, parameter) is not parameter:
                self.repeated.append((name, parameter))
        self.every = options.checkpoint_every
        self.saver: Saver | None = None
        self._blocking = False
        self._event = event_class(run.device)
        self._asked: tuple[Tensor, Any] | None = None  # of the step before, on the host once the event has come
        if self.every is not None:
            folder: Path = broadcast_object(run.outdir)  # which rank 0 has made
            keep, keep_every = options.keep or 2, options.keep_every
            self._blocking = options.checkpoint_mode == "blocking"
            group = dist.new_group(backend="gloo")  # which sends from the host, whatever the device
            self.saver = Saver(folder / CHECKPOINTS, group, keep, keep_every, run.note, metadata)
        else:
            run.log.info("%s", without_checkpoints(options))
        self.replicas: ReplicaSaver | None = None
        if (memory := record.memory) is not None:
            from mmm.checkpoint.replica import ReplicaSaver  # a run with --replica only

            self.replicas = ReplicaSaver(
                memory.folder, memory.group, 1, None, self._copy_failed, what="copy in memory", memory=memory
            )
            self._copy_noted = False
            self._predict(times=2 if len(memory.hosts) == 1 else 4)

    def load(self) -> tuple[int, RowSoFar]:
        """The step to begin with, and the row under way. A collective."""
        if (origin := self.record.origin) is None:
            return 0, RowSoFar()
        manifest, run = origin.manifest, self.run
        buffers = self.model.saved_buffers()

        def fetch(names: list[str]) -> None:
            if origin.in_memory and self.record.memory is not None:
                self.record.memory.fetch(origin.path, manifest.files, names)

        load_tensors(origin.path, manifest.files, self.parameters, buffers, self.optimizer, self.repeated, fetch)
        self.model.gather_updated()
        state, there = manifest.state, manifest.about["layout"]
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        moved = "" if there == str(run.layout) else f", saved on the layout {there}"
        where = "a copy in memory" if origin.in_memory else origin.path
        run.note(f"resumed from {where} at step {manifest.step}{moved}")
        losses = state["losses"]
        if not losses:
            return manifest.step, RowSoFar()
        if not moved:
            local = losses[run.rank.rank]
        elif run.rank.rank == run.layout.loss_ranks()[0]:  # the losses that add up to the global loss
            local = sum(losses[rank] for rank in state["loss_ranks"])
        else:
            local = 0.0
        local_loss = torch.tensor(local, dtype=accum_dtype(run.device), device=run.device)
        return manifest.step, RowSoFar(state["since"], state["counted"], local_loss)

    def compare_rates(self, rate: Callable[[int], float]) -> None:
        """Say it where the learning rate leaves the curve that it had in the run that goes on.

        Args:
            rate: of a step, by this run's flags.
        """
        manifest = None if self.record.origin is None else self.record.origin.manifest
        if manifest is None or not manifest.step or (before := manifest.state.get("lr")) is None:
            return
        last, step = manifest.step - 1, manifest.step
        if not math.isclose(before, rate(last), rel_tol=1e-9, abs_tol=1e-12):
            self.run.note(
                f"the learning rate leaves its curve: it was {before:.6g} in step {last}, for which this run's flags "
                f"say {rate(last):.6g}; step {step}, the next, is made with {rate(step):.6g} (--max_iters, --epochs, "
                "--lr and the schedule's flags as they were before go on along the same curve)"
            )

    def stop_asked(self) -> bool:
        """Whether a signal to stop has come to any rank. A collective. On CUDA and XPU, where the host is ahead of the
        device, whether one had come when the step before was over: the host waits for that step alone."""
        if self.every is None:
            return False
        if self.replicas is not None:  # then no more steps are lost than lie between two copies
            self.replicas.wait()
        run = self.run
        asked = float(self.record.stop.came is not None)
        came = torch.full((1,), asked, device=run.device)  # a kernel: no copy to wait for
        if run.rank.world_size > 1:
            dist.all_reduce(came, dist.ReduceOp.MAX)
        if self._event is None:
            return bool(came.item())
        on_host, ready = came.to("cpu", non_blocking=True), self._event()
        ready.record()
        before, self._asked = self._asked, (on_host, ready)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].item())

    def due(self, step: int, last: bool) -> list[Saver]:
        """By which to save after this step."""
        savers: list[Saver] = []
        if self.saver is not None and self.every is not None and ((step + 1) % self.every == 0 or last):
            savers.append(self.saver)
        if self.replicas is not None and (step + 1) % (self.options.replica or 1) == 0 and not last:
            savers.append(self.replicas)
        return savers

    def save(self, savers: list[Saver], done: int, so_far: RowSoFar) -> None:
        """Begin to save. A collective.

        Args:
            savers: of `due`.
            done: steps.
            so_far: the row under way.
        """
        run = self.run
        losses: list[float] = []
        if so_far.loss is not None:
            losses = [loss for (loss,) in gather_floats(so_far.loss.view(1), run.device)]
        rows = self.record.history
        if rows is not None:
            rows.flush()  # the rows that the checkpoint counts on
        state = {
            "rows": 0 if rows is None else len(rows),
            "scaler": self.scaler.state_dict(),
            "lr": learning_rate(self.optimizer),
            "since": so_far.steps,
            "counted": float(so_far.counted),
            "losses": losses,
            "loss_ranks": run.layout.loss_ranks() if losses else [],
        }
        about = {"layout": str(run.layout), "command": command_line(), "versions": versions()}
        manifest = Manifest(done, self.record.identity, state, about, {})
        tensors = training_state(self.parameters, self.model.saved_buffers(), self.optimizer)
        for saver in savers:
            saver.save(tensors, manifest)
        if self._blocking:
            self.wait()

    def poll(self) -> None:
        """Say what has gone wrong with a save, if it has ended."""
        if self.saver is not None:
            self.saver.poll()

    def _copy_failed(self, text: str) -> None:
        if not self._copy_noted:
            self.run.note(f"{text}; others are tried, and no more is said")
        self._copy_noted = True

    def _predict(self, times: int) -> None:
        """Say what copies take of the memory of rank 0's host. A collective."""
        memory, spec = self.record.memory, self.run.training_spec
        assert memory is not None
        assert spec is not None
        local = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters.values()]
        size = sum(x.numel() * x.element_size() for x in local) * (1 + STATE[spec.optimizer])
        sizes = memory.gather(size)
        needed, free = times * sum(sizes[rank] for rank in memory.local), disk_usage(memory.folder).free
        text = f"--replica {self.options.replica}: copies take at most {needed / 1e9:,.2f} GB of a host's memory"
        self.run.note(text + (f", and {memory.folder} has {free / 1e9:,.2f} GB left" if needed > free else ""))

    def stop(self, done: int) -> NoReturn:
        """End the run, which is saved as of so many steps. A collective."""
        complete, saved = self.wait(), ""
        if complete and self.saver is not None:
            where = self.saver.folder.parent if self.run.options.outdir is None else "auto"
            saved = f", and saved: the same command with --resume {where} goes on from there"
        self.run.note(f"stopped by a signal after {done} steps{saved}")
        raise SystemExit(SAVED_EXIT if complete else 1)

    def wait(self) -> bool:
        """Wait for the save under way. Whether the newest is complete."""
        if self.replicas is not None:
            self.replicas.wait()
        return self.saver is None or self.saver.wait()
