"""`History` keeps a run's rows on disk while it runs. Only rank 0 makes one."""

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

# The most seconds between two writes, as long as rows come.
FLUSH_SECONDS = 5.0
log = logging.getLogger("mmm")


class History:
    """Keeps the rows of a run in `outdir`: in journal.jsonl while it runs, in train_dataset.h5 after `close`.

    A run that is killed at any moment loses at most its last `flush_every` rows; `mmm.history.load` reads the others.
    If an exception ends the ``with`` block, the record names it: `mmm.history.state`.

    Args:
        outdir: the run's folder (see `prepare`). It is made if it does not exist.
        ranks: one mapping for each rank, in order: ``rank``, ``host``, ``local_rank``, ``pid`` and the coordinate on
            each mesh axis (``"tp": 1``). They become coordinates of the dataset, the mesh axes as ``axis_<name>``.
        flush_every: the most rows between two writes. Rows are also written 5 s after the last write, so that a slow
            run is seen while it runs.
        full_ranks: the most ranks for which a variable that differs by rank is kept in full, (draw, rank). With more
            ranks, a variable x is kept as ``x_min``, ``x_median``, ``x_max`` and ``x_argmax`` (the rank of the
            largest).
        resume: how to continue the record that the folder holds; None: begin a new one.

    Raises:
        RecordError: the folder holds rows already, or cannot be written to.
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
            raise RecordError(f"a History needs flush_every >= 1 and at least one rank: {flush_every=}, {len(ranks)=}.")
        self.outdir = Path(outdir)
        self.flush_every = flush_every
        self._ranks = _plain_ranks(ranks)
        # Whether variables that differ by rank are kept in full.
        self._full = len(ranks) <= full_ranks
        # Names that a variable cannot have, and those that were checked.
        self._taken = taken_names(self._ranks)
        self._names: set[str] = set()
        # Rows since the last write, the draw of the next row, and the time of the last write.
        self._pending: list[LoggedRow] = []
        self._next = 0
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
        """Add one row.

        Args:
            row: name → value. A name may appear for the first time in a later row; earlier rows then hold NaN.
            per_rank: name → one value for each rank, in rank order. If `row` has the name as well, its value is not
                kept.

        Raises:
            RecordError: a name or a value does not fit, or the rows are due to be written, and the journal cannot be
                written. Then the row stays in memory, and the next write tries again.
        """
        if self._closed:
            raise RecordError(f"the history in {self.outdir} is closed: no row can be added.")
        per_rank = per_rank or {}
        self._admit(row.keys() | per_rank.keys())
        scalars = {name: _plain_number(name, value) for name, value in row.items()}
        spread: dict[str, list[float | int]] = {}
        for name, rank_values in per_rank.items():
            scalars.pop(name, None)
            values = self._values_by_rank(name, rank_values)
            if self._full:
                spread[name] = values
            else:
                scalars |= _reduced(name, values)
        self._pending.append(LoggedRow(self._next, scalars, spread))
        self._next += 1
        if len(self._pending) >= self.flush_every or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were added since the last write.

        Raises:
            RecordError: they cannot be written. They stay in memory.
        """
        if self._pending:
            self._journal.append(self._pending)
            self._pending = []
        self._flushed = time.monotonic()

    def close(self, error: BaseException | None = None) -> Path:
        """Make train_dataset.h5, remove the journal, and return the dataset's path. A second call does nothing.

        Args:
            error: the exception that has ended the run, for the record; None if it finished.

        Raises:
            RecordError: the dataset cannot be written. The journal stays, and `close` may be called again.
        """
        if not self._closed:
            self.flush()
            self._journal.ensure()
            self.ending = ending_of(error)
            # The ending is written first, in case a kill comes before the dataset is written. If that fails,
            # `finalize_now` tries again, and logs a warning.
            with contextlib.suppress(RecordError):
                write_ending(self.outdir, self.ending)
            finalize_now(self.outdir, self.ending)
            self._journal.close()
            self._closed = True
        return self.outdir / DATASET

    def discard(self) -> bool:
        """Remove the record if this run has begun it and it has no row. Returns whether it was removed."""
        if self._next or not self._is_new:
            return False
        self._journal.close()
        self._closed = True
        remove_new(self.outdir)
        return True

    def __len__(self) -> int:
        """Number of rows, including those of the earlier runs that this one continues."""
        return self._next

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close(error)
        except (KeyboardInterrupt, SystemExit):
            # A signal came while closing, because launch ends the other ranks as well: the record is closed first.
            self.close(error)
            raise
        except Exception as second:
            if error is None:
                raise
            # The first error is the one that matters.
            log.warning("the record in %s was not finalized: %s", self.outdir, second)

    def _admit(self, names: Set[str]) -> None:
        """Check the names of a row that are new. Raises RecordError if one of them cannot name a variable."""
        for name in names - self._names:
            problem = name_problem(name, self._taken)
            if problem:
                raise RecordError(f"{problem}.")
            self._names.add(name)

    def _values_by_rank(self, name: str, rank_values: Any) -> list[float | int]:
        """Check that there is one number for each rank, and return the numbers, (rank,)."""
        n_ranks = len(self._ranks)
        if isinstance(rank_values, np.ndarray) and not self._full and len(rank_values) == n_ranks:
            # The values will only be reduced: a Python object for each of many ranks would be slow.
            return rank_values  # type: ignore[return-value]
        values = rank_values.tolist() if hasattr(rank_values, "tolist") else rank_values
        if len(values) != n_ranks:
            raise RecordError(f"per_rank[{name!r}] has {len(values)} values, and this run has {n_ranks} ranks.")
        return [_plain_number(name, value) for value in values]


def _plain_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each rank's coordinates by their names in the dataset: ``host``, ``local_rank``, ``pid``, ``axis_<name>``.

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
            if key == "rank":
                continue
            name = f"axis_{key}" if key in AXES else key
            if hasattr(value, "__index__"):
                coordinates[name] = int(value)
            else:
                coordinates[name] = str(value)
        plain.append(coordinates)
    return plain


def _plain_number(name: str, value: Any) -> float | int:
    """Convert a number, a bool, a NumPy scalar or a tensor of one element to a Python number."""
    if type(value) is float or type(value) is int:
        return value
    try:
        plain = value.item() if hasattr(value, "item") else value
        return int(plain) if isinstance(plain, int) else float(plain)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{name}={value!r} is not a number, and a row holds numbers.") from error


def _reduced(name: str, values: list[float | int]) -> dict[str, float | int]:
    """Reduce a variable over ranks: its minimum, median, maximum, and the rank of the maximum. NaN does not count."""
    column = np.array(values, dtype=np.float64)
    least = math.nan
    median = math.nan
    most = math.nan
    rank = -1
    # NumPy warns if all values are NaN.
    if not np.isnan(column).all():
        least = float(np.nanmin(column))
        median = float(np.nanmedian(column))
        most = float(np.nanmax(column))
        rank = int(np.nanargmax(column))
    return {
        f"{name}_min": least,
        f"{name}_median": median,
        f"{name}_max": most,
        f"{name}_argmax": rank,
    }
