"""Saving while training goes on.

This rank's tensors are copied to the host, and ``dcp.save`` writes the copy in a thread of its own. The ranks agree
there over a group of their own: a collective of the training must not get between. So the loop waits for the copy
alone, and for a save that has not ended when the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mmm.checkpoint.host_copy import HostCopy
from mmm.checkpoint.manifest import PARTIAL, FileSum, Manifest, complete, discard
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.checkpoint.state import one_line
from mmm.checkpoint.storage import Writer
from mmm.errors import CheckpointError


@dataclass
class Saver:
    """Saves into one folder of checkpoints.

    Attributes:
        folder: on a file system that all ranks share. group: of all ranks, for sending from the host, and for nothing
            else. keep, keep_every: as for `mmm.checkpoint.manifest.complete`.
        failed: called on every rank with why a save has failed; the training goes on.
        metadata: what each checkpoint keeps of the model besides. what: is saved, for `failed`.
    """

    folder: Path
    group: dist.ProcessGroup | None
    keep: int
    keep_every: int | None
    failed: Callable[[str], None]
    metadata: ModelMetadata = field(default_factory=ModelMetadata)
    what: str = "checkpoint"
    _running: tuple[int, Future] | None = None
    _complete: bool = True  # the newest save that has ended
    _host_copy: HostCopy = field(default_factory=HostCopy)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))

    def save(self, state: dict[str, Any], manifest: Manifest) -> None:
        """Begin to save; wait first for the save before it. A collective.

        Args:
            state: of `training_state`; it may change as soon as this returns. manifest: without files; rank 0's counts.
        """
        self.wait()
        copied = self._host_copy.of(state)
        self._running = (manifest.step, self._thread.submit(self.write, copied, manifest))

    def write(self, state: dict[str, Any], manifest: Manifest) -> None:
        """Write a state that is on the host. A collective; in the saver's thread."""
        partial = self.partial(manifest.step)

        def finished(files: dict[str, FileSum]) -> None:
            hidden = [name for name in files if not (partial / name).exists()]
            if hidden:
                raise CheckpointError(f"{partial / hidden[0]} is not there for rank 0: hosts have to share --outdir")
            about, others = manifest.about | self.metadata.describe(), self.metadata.write_tokenizer(partial)
            replace(manifest, about=about, files=files | others).write(partial)
            complete(partial, self.keep, self.keep_every)

        dcp.save(state, storage_writer=Writer(partial, finished), process_group=self.group)

    def partial(self, step: int) -> Path:
        """The folder that a checkpoint is written to."""
        return self.folder / f"step-{step}{PARTIAL}"

    def poll(self) -> None:
        """Say by `failed` if a save has failed meanwhile. Waits for nothing."""
        if self._running is not None and self._running[1].done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save under way. Whether the newest, if there is one, is complete."""
        if self._running is None:
            return self._complete
        (step, future), self._running = self._running, None
        self._complete = False
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # whatever it is, the training goes on
            failures = error.failures if isinstance(error, CheckpointException) else {}
            first = next((each for each, _ in failures.values()), error)
            if not dist.is_initialized() or dist.get_rank() == 0:
                discard(self.partial(step))  # the disk may be full
            self.failed(f"no {self.what} of step {step}: {one_line(first)}")
        else:
            self._complete = True
        return self._complete
