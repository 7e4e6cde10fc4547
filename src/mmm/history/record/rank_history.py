"""A record for a loop of any framework: each rank gives its row, and rank 0 keeps those of all."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmm.errors import RecordError
from mmm.history.record.history import History


class RankHistory:
    """A `History` that every rank of a `torch.distributed` program makes and updates; it needs no run of `mmm`.

    A program of one process without process groups may use it as well.

    Args:
        outdir: the folder, which only rank 0 writes to.

    Raises:
        RecordError: on every rank: the folder holds rows already, or cannot be written to.
    """

    def __init__(self, outdir: Path | str) -> None:
        import torch.distributed as dist

        # None: one process.
        self._group = dist if dist.is_available() and dist.is_initialized() else None
        rank = 0 if self._group is None else dist.get_rank()
        about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        ranks = self._gather(about)
        problem: str | None = None
        self.history: History | None = None
        if rank == 0:
            try:
                self.history = History(outdir, ranks=ranks)
            except RecordError as error:
                problem = str(error)
        problem = self._gather(problem)[0]
        if problem is not None:
            raise RecordError(problem)

    def update(self, row: Mapping[str, float | int], **of_this_rank: float) -> None:
        """Add one row. A collective of all ranks.

        Args:
            row: name → value that all ranks have alike, such as the step's number. Rank 0's is kept.
            of_this_rank: name → this rank's value, a number. The names are the same on every rank.

        Raises:
            RecordError: on rank 0: as `History.update`.
        """
        by_rank = self._gather(of_this_rank)
        if self.history is not None:
            per_rank = {name: [values[name] for values in by_rank] for name in of_this_rank}
            self.history.update(row, per_rank)

    def close(self) -> None:
        """Finish the record. Without it, `mmm history` reads the rows as those of a run that was killed."""
        if self.history is not None:
            self.history.close()

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._group.get_world_size()
        self._group.all_gather_object(values, value)
        return values
