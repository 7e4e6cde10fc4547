"""A record that goes on: where a run is resumed, its rows from there on are made once more, and stand in it once."""

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
    """How a record goes on.

    Attributes:
        rows: those before it stay, the others are dropped: the run makes them again.
        mark: what to say of it beside ``draw``, as ``{"step": 20, "layout": "dp4"}``.
    """

    rows: int
    mark: Mapping[str, Any]

    def reopen(self, folder: Path, header: Header) -> Header:
        """Leave the rows before the resumption in the dataset, and return the header of the journal that goes on.

        Args:
            header: of the run that goes on. Ranks that only the earlier run had stay after its own.

        Raises:
            RecordError: the record that is there cannot be read, or the dataset cannot be written.
        """
        attrs: dict[str, Any] = dict(header.attrs)
        marks: list[Any] = []
        ranks = header.ranks
        if any((folder / name).exists() for name in (DATASET, JOURNAL)):
            earlier = dataset_of(folder, Ending(KILLED))
            rows = [row for row in to_rows(earlier) if row.draw < self.rows]
            marks = [mark for mark in marks_of(earlier) if mark["draw"] <= self.rows]
            attrs["started"] = earlier.attrs.get("started", attrs.get("started"))
            if LEFT_OUT in earlier.attrs:
                attrs[LEFT_OUT] = earlier.attrs[LEFT_OUT]
            before = _ranks_of(earlier)
            ranks = [*ranks, *before[len(ranks) :]]
            shortened = to_dataset(before, {**earlier.attrs, MARKS: marks}, rows, read_config(folder))
            write_dataset(shortened, folder / DATASET)
        attrs[MARKS] = [*marks, {"draw": self.rows, **self.mark}]
        return Header(ranks, attrs)


def check_over(folder: Path, this: Attempt | None, from_checkpoint: bool) -> None:
    """Whether the record in a folder, if there is one, may go on.

    Args:
        this: an earlier attempt of the same launch is known to be over. from_checkpoint: or from the beginning.

    Raises:
        RecordError: its run is still writing; or it has finished, and there is no checkpoint to go on from.
    """
    config = read_config(folder)
    if this is not None and this.follows(attempt_of(config)):
        return
    try:
        why = why_running(folder)
    except OSError:  # there is no journal
        ending = read_ending(config)
        if ending is not None and ending.state == FINISHED and not from_checkpoint:
            raise RecordError(
                f"--outdir {folder} holds the record of a run that has finished, and no checkpoint to go on from. "
                "Give another --outdir, or pass --overwrite."
            ) from None
        return
    if why:
        raise still_writing(folder, why)


def _ranks_of(ds: "xarray.Dataset") -> list[dict[str, Any]]:
    """The coordinates of each rank, by name."""
    columns = {}
    for name, values in ds.coords.items():
        if values.dims == ("rank",) and name != "rank" and not str(name).startswith("startup_"):
            columns[str(name)] = values.values.tolist()
    return [{name: column[rank] for name, column in columns.items()} for rank in range(ds.sizes["rank"])]
