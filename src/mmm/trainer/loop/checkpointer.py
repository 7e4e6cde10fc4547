"""When a run saves, and when a signal ends it; what it saves is for the loop to say: that of the trainers
(`mmm.trainer.loop.checkpoints`), or a script's own (`mmm.trainer.loop.script_checkpoints`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.checkpoint import Manifest, Saver
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.history.record.folder import versions
from mmm.runtime.clock import event_class
from mmm.runtime.contract import SAVED_EXIT
from mmm.runtime.process_group import broadcast_object
from mmm.runtime.ranks import command_line
from mmm.trainer.config.training import CheckpointOptions
from mmm.trainer.run.core import Run
from mmm.trainer.run.origin import Origin
from mmm.trainer.run.resume import CHECKPOINTS, ResumableRecord
from mmm.units import counted


class Checkpointer:
    """Does nothing without ``--checkpoint_every`` and ``--resume``.

    Attributes:
        record: of the run. every: steps between two checkpoints; None: none are saved.
    """

    def __init__(self, run: Run, options: CheckpointOptions, metadata: ModelMetadata) -> None:
        """A collective."""
        self.run, self.options, self.every = run, options, options.checkpoint_every
        record = run.hook(ResumableRecord)
        assert record is not None, "the hooks of a program with checkpoints have none that resumes"
        self.record, record.finish_save = record, self.wait
        self.saver: Saver | None = None
        self._blocking = options.checkpoint_mode == "blocking"
        self._event = event_class(run.device)
        self._asked: tuple[Tensor, Any] | None = None  # of the step before, on the host once the event has come
        if self.every is not None:
            folder: Path = broadcast_object(run.outdir)  # which rank 0 has made
            group = dist.new_group(backend="gloo")  # which sends from the host, whatever the device
            self.saver = Saver(folder / CHECKPOINTS, group, options.keep or 2, run.note, metadata)

    def note_origin(self, origin: Origin) -> bool:
        """Say where the run goes on. Whether it is on another layout."""
        there = origin.manifest.about["layout"]
        moved = there != str(self.run.layout)
        saved = f", saved on the layout {there}" if moved else ""
        self.run.note(f"resumed from {origin.path} at step {origin.manifest.step}{saved}")
        return moved

    def stop_asked(self) -> bool:
        """Whether a signal to stop has come to any rank. A collective. On CUDA and XPU, where the host is ahead of the
        device, whether one had come when the step before was over: the host waits for that step alone."""
        if self.every is None:
            return False
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

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after this step."""
        return self.every is not None and ((step + 1) % self.every == 0 or last)

    def write(self, done: int, state: Mapping[str, Any], tensors: dict[str, Any]) -> None:
        """Begin to save. A collective; where a save is `due`.

        Args:
            done: steps.
            state: of the manifest, without the rows.
            tensors: of this rank, as `mmm.checkpoint.training_state`; they may change as soon as this returns.
        """
        rows = self.record.history
        if rows is not None:
            rows.flush()  # the rows that the checkpoint counts on
        about = {"layout": str(self.run.layout), "command": command_line(), "versions": versions()}
        counted = {"rows": 0 if rows is None else len(rows), **state}
        manifest = Manifest(done, self.record.identity, counted, about, {})
        assert self.saver is not None
        self.saver.save(tensors, manifest)
        if self._blocking:
            self.wait()

    def poll(self) -> None:
        """Say what has gone wrong with a save, if it has ended."""
        if self.saver is not None:
            self.saver.poll()

    def stop(self, done: int) -> NoReturn:
        """End the run, which is saved as of so many steps. A collective."""
        complete, saved = self.wait(), ""
        if complete and self.saver is not None:
            where = self.saver.folder.parent if self.run.options.outdir is None else "auto"
            saved = f", and saved: the same command with --resume {where} goes on from there"
        self.run.note(f"stopped by a signal after {counted(done, 'step')}{saved}")
        raise SystemExit(SAVED_EXIT if complete else 1)

    def wait(self) -> bool:
        """Wait for the save under way. Whether the newest is complete."""
        return self.saver is None or self.saver.wait()
