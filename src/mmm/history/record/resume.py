"""Continues the record of a run that is resumed.

The run makes its rows from the checkpoint on once more. The record keeps each row once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmm.errors import RecordError
from mmm.history.record.attempts import Attempt, attempt_of
from mmm.history.record.dataset import MARKS, marks_of, still_writing, to_dataset, to_rows, write_dataset
from mmm.history.record.ending import FINISHED, KILLED, Ending, read_config, read_ending
from mmm.history.record.folder import DATASET, JOURNAL
from mmm.history.record.journal import LEFT_OUT, Header
from mmm.history.record.reader import dataset_of, why_running

if TYPE_CHECKING:
    import xarray


class Resume(NamedTuple):
    """Where a record is continued.

    Attributes:
        rows: number of rows that stay. The later ones are dropped, because the run makes them again.
        mark: what the record notes about the resumption besides ``draw``, such as ``{"step": 20, "layout": "dp4"}``.
    """

    rows: int
    mark: Mapping[str, Any]

    def reopen(self, folder: Path, header: Header) -> Header:
        """Leave only the rows before the resumption in the dataset, and return the header of the new journal.

        Args:
            folder: the run's folder.
            header: header of the run that resumes. Ranks that only the earlier run had are kept after its own.

        Raises:
            RecordError: the existing record cannot be read, or the dataset cannot be written.
        """
        attrs: dict[str, Any] = dict(header.attrs)
        marks: list[Any] = []
        ranks = header.ranks
        if (folder / DATASET).exists() or (folder / JOURNAL).exists():
            earlier = dataset_of(folder, Ending(KILLED))
            rows = [row for row in to_rows(earlier) if row.draw < self.rows]
            marks = [mark for mark in marks_of(earlier) if mark["draw"] <= self.rows]
            # The record began when its first run began.
            attrs["started"] = earlier.attrs.get("started", attrs.get("started"))
            if LEFT_OUT in earlier.attrs:
                attrs[LEFT_OUT] = earlier.attrs[LEFT_OUT]
            earlier_ranks = _ranks_of(earlier)
            ranks = [*ranks, *earlier_ranks[len(ranks) :]]
            earlier_attrs = {**earlier.attrs, MARKS: marks}
            shortened = to_dataset(earlier_ranks, earlier_attrs, rows)
            write_dataset(shortened, folder / DATASET)
        attrs[MARKS] = [*marks, {"draw": self.rows, **self.mark}]
        return Header(ranks, attrs)


def check_over(folder: Path, this: Attempt | None, from_checkpoint: bool) -> None:
    """Check that the run whose record is in a folder, if there is one, is over, so that the record may be continued.

    Args:
        folder: the run's folder.
        this: the attempt of this process: an earlier attempt of the same launch is known to be over.
        from_checkpoint: whether there is a checkpoint; if not, the run starts from its beginning.

    Raises:
        RecordError: its run is still writing; or it has finished, and there is no checkpoint to continue from.
    """
    config = read_config(folder)
    if this is not None and this.follows(attempt_of(config)):
        return
    try:
        why = why_running(folder)
    except OSError:
        # There is no journal: the run has ended in order, or never began.
        ending = read_ending(config)
        if ending is not None and ending.state == FINISHED and not from_checkpoint:
            raise RecordError(
                f"--outdir {folder} holds the record of a run that has finished, and no checkpoint to continue from. "
                "Give another --outdir, or pass --overwrite."
            ) from None
        return
    if why:
        raise still_writing(folder, why)


def _ranks_of(ds: "xarray.Dataset") -> list[dict[str, Any]]:
    """Return the coordinates of each rank, name → value, as a `Header` has them."""
    columns: dict[str, list[Any]] = {}
    for name, coordinate in ds.coords.items():
        if coordinate.dims != ("rank",) or name == "rank":
            continue
        # Records of before have the marks of the start-up, which are in config.json.
        if not str(name).startswith("startup_"):
            columns[str(name)] = coordinate.values.tolist()
    ranks = []
    for rank in range(ds.sizes["rank"]):
        ranks.append({name: column[rank] for name, column in columns.items()})
    return ranks
