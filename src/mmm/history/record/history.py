"""`History`: one row a step, kept on disk while the run goes on. Rank 0 makes one; the other ranks make none."""

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence, Set
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

import mmm
from mmm.errors import RecordError
from mmm.history.record.dataset import finalize_now
from mmm.history.record.ending import RUNNING, Ending, ending_of, write_ending
from mmm.history.record.folder import DATASET, JOURNAL, reason, remove_new
from mmm.history.record.journal import Header, Journal, LoggedRow, name_problem, taken_names

if TYPE_CHECKING:
    from mmm.history.record.resume import Resume

AXES = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
FLUSH_SECONDS = 5.0  # between two writes, at most, where rows come
log = logging.getLogger("mmm")


class History:
    """Keeps the rows of a run in `outdir`: in journal.jsonl while it runs, in train_dataset.h5 after `close`.

    A run that is killed at any moment loses at most its last `flush_every` rows; `mmm.history.load` reads the others.
    Where an exception ends the ``with`` block, the record names it: `mmm.history.state`.

    Args:
        outdir: the run's folder (see `prepare`); made if it does not exist.
        ranks: one mapping a rank, in order: ``rank``, ``host``, ``local_rank``, ``pid`` and the coordinate on each mesh
            axis (``"tp": 1``). They become coordinates of the dataset, the mesh axes as ``axis_<name>``.
        flush_every: rows between two writes, at most; rows also go to the file 5 s after the last write, so that a slow
            run is seen while it runs.
        full_ranks: up to this many ranks a variable given by rank is kept in full, (draw, rank); above it a variable x
            is kept as ``x_min``, ``x_median``, ``x_max`` and ``x_argmax`` (the rank of the largest).
        resume: go on with the record that the folder holds.

    Raises:
        RecordError: the folder holds rows already, or cannot be written.
    """

    def __init__(
        self,
        outdir: Path | str,
        *,
        ranks: Sequence[Mapping[str, Any]],
        flush_every: int = 10,
        full_ranks: int = 64,
        resume: "Resume | None" = None,
    ) -> None:
        if flush_every < 1 or not ranks:
            raise RecordError(f"a History needs flush_every >= 1 and a rank or more: {flush_every=}, {len(ranks)=}.")
        self.outdir = Path(outdir)
        self.flush_every = flush_every
        self._ranks = _plain_ranks(ranks)
        self._full = len(ranks) <= full_ranks
        self._taken = taken_names(self._ranks)
        self._names: set[str] = set()
        self._pending: list[LoggedRow] = []
        self._next = 0  # draw
        self._flushed = time.monotonic()
        self._closed = False
        self._is_new = resume is None
        existing = [name for name in (DATASET, JOURNAL) if (self.outdir / name).exists()]
        if existing and resume is None:
            raise RecordError(
                f"{self.outdir} already holds rows ({', '.join(existing)}). Prepare another folder, or pass overwrite."
            )
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        about = {"mmm_version": mmm.__version__, "started": started, "world_size": len(ranks)}
        try:
            self.outdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot make the folder {self.outdir}: {reason(error)}. Give another.") from error
        header = Header(self._ranks, about)
        if resume is not None:
            header = resume.reopen(self.outdir, header)
            self._next = resume.rows
        self._journal = Journal(self.outdir / JOURNAL, header)
        self.ending = Ending(RUNNING)
        write_ending(self.outdir, self.ending)

    def update(
        self, row: Mapping[str, float | int], per_rank: Mapping[str, Sequence[float] | np.ndarray] | None = None
    ) -> None:
        """Keep one row.

        Args:
            row: values by name. A name may appear later; earlier rows then hold NaN.
            per_rank: one value a rank by name, in rank order; a value that `row` has by that name is not kept.

        Raises:
            RecordError: a name or a value does not fit, or, when the rows are due, the journal cannot be written.
                The row stays in memory then, and the next write tries again.
        """
        if self._closed:
            raise RecordError(f"the history in {self.outdir} is closed: no row can be added.")
        per_rank = per_rank or {}
        self._admit(row.keys() | per_rank.keys())
        scalars = {name: _number(name, value) for name, value in row.items()}
        spread: dict[str, list[float | int]] = {}
        for name, rank_values in per_rank.items():
            scalars.pop(name, None)
            values = self._one_a_rank(name, rank_values)
            if self._full:
                spread[name] = values
            else:
                scalars |= _reduced(name, values)
        self._pending.append(LoggedRow(self._next, scalars, spread))
        self._next += 1
        if len(self._pending) >= self.flush_every or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows kept since the last write. RecordError if that fails; they stay in memory."""
        if self._pending:
            self._journal.append(self._pending)
            self._pending = []
        self._flushed = time.monotonic()

    def close(self, error: BaseException | None = None) -> Path:
        """Make train_dataset.h5, remove the journal, and return the dataset's path. A second call does nothing.

        Args:
            error: what has ended the run, for the record.

        Raises:
            RecordError: the dataset cannot be written. The journal stays, and `close` may be called again.
        """
        if not self._closed:
            self.flush()
            self._journal.ensure()
            self.ending = ending_of(error)
            with contextlib.suppress(RecordError):  # of which `finalize_now` says, if it cannot either
                write_ending(self.outdir, self.ending)  # first, in case a kill comes before the dataset is written
            finalize_now(self.outdir, self.ending)
            self._journal.close()
            self._closed = True
        return self.outdir / DATASET

    def discard(self) -> bool:
        """Leave nothing of a record that this run has begun and that has no row. Returns whether it was one."""
        if self._next or not self._is_new:
            return False
        self._journal.close()
        self._closed = True
        remove_new(self.outdir)
        return True

    def __len__(self) -> int:
        """Rows; where the record goes on, with those before."""
        return self._next

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close(error)
        except (KeyboardInterrupt, SystemExit):  # a signal while closing: launch ends the other ranks as well
            self.close(error)
            raise
        except Exception as second:
            if error is None:
                raise
            # The first error is the one that matters.
            log.warning("the record in %s was not finalized: %s", self.outdir, second)

    def _admit(self, names: Set[str]) -> None:
        """Raises RecordError: one of them cannot name a variable."""
        for name in names - self._names:
            problem = name_problem(name, self._taken)
            if problem:
                raise RecordError(f"{problem}.")
            self._names.add(name)

    def _one_a_rank(self, name: str, rank_values: Any) -> list[float | int]:
        if isinstance(rank_values, np.ndarray) and not self._full and len(rank_values) == len(self._ranks):
            return rank_values  # type: ignore[return-value]  # only reduced: no Python object for each of many ranks
        listed = rank_values.tolist() if hasattr(rank_values, "tolist") else rank_values
        if len(listed) != len(self._ranks):
            raise RecordError(
                f"per_rank[{name!r}] has {len(listed)} values, and this run has {len(self._ranks)} ranks."
            )
        return [_number(name, value) for value in listed]


def _plain_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each rank's coordinates by their names in the dataset: ``host``, ``local_rank``, ``pid``, ``axis_<name>``, …

    Every value becomes an int or text.

    Raises:
        RecordError: the ranks are not numbered 0, 1, 2, … in this order.
    """
    plain = []
    for index, about in enumerate(ranks):
        rank = about.get("rank", index)
        if rank != index:
            raise RecordError(f"ranks must be given in order: place {index} of {len(ranks)} holds rank {rank}.")
        coordinates: dict[str, Any] = {}
        for key, value in about.items():
            if key != "rank":
                name = f"axis_{key}" if key in AXES else key
                coordinates[name] = int(value) if hasattr(value, "__index__") else str(value)
        plain.append(coordinates)
    return plain


def _number(name: str, value: Any) -> float | int:
    """A Python number from one, a bool, a NumPy scalar or a tensor of one element."""
    if type(value) is float or type(value) is int:
        return value
    try:
        plain = value.item() if hasattr(value, "item") else value
        return int(plain) if isinstance(plain, int) else float(plain)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{name}={value!r} is not a number, and a row holds numbers.") from error


def _reduced(name: str, values: list[float | int]) -> dict[str, float | int]:
    """Smallest, median and largest over ranks, and the rank of the largest; ranks that gave NaN do not count."""
    column = np.array(values, dtype=np.float64)
    least = median = most = math.nan
    rank = -1
    if not np.isnan(column).all():
        least = float(np.nanmin(column))
        median = float(np.nanmedian(column))
        most = float(np.nanmax(column))
        rank = int(np.nanargmax(column))
    return {f"{name}_min": least, f"{name}_median": median, f"{name}_max": most, f"{name}_argmax": rank}
