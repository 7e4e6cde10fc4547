"""The ranks that a field is split over, and what a module knows of the fields that it gets.

A strip does not know its field: 5 rows may be of 20 or of 21. So a trial of the whole model (`trial`), before it
trains, notes on each module which dims of its input are split, and how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mmm.errors import ConfigError
from mmm.nn.init import class_name
from mmm.parallel.cp.space.strips import Bounds, own_rows
from mmm.parallel.cp.space.take import Axis

# Maps a dim of a module's input, for each rank, to how fields lie by the rows that it has.
Notes = dict[int, list[dict[int, Bounds]]]
# Name of a module's attribute.
NOTES = "field_notes"


class Split:
    """The ranks that fields are split over, along their rows.

    Attributes:
        group: these ranks.
        rank: this rank's place in it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()

    def own(self, field: Tensor, dim: int) -> Tensor:
        """This rank's rows of a full field. A view."""
        return own_rows(field, self.group.size(), self.rank, dim)

    def axes(self, module: nn.Module, x: Tensor, first: int = 2) -> Iterator[Axis]:
        """How each dim of a module's input lies over the ranks, from `first` on: of (batch, channels, …) each dim of
        space.

        Raises:
            ConfigError: the trial has seen no such input of this module.
        """
        notes: Notes | None = getattr(module, NOTES, None)
        if notes is None:
            raise ConfigError(
                f"cp_style space: {class_name(module)} did not run in the trial before the training; have every "
                f"forward call the same modules"
            )
        for dim in range(first, x.ndim):
            length = x.shape[dim]
            if dim not in notes:
                yield Axis(dim, ((0, length),))
                continue
            by_length = notes[dim][self.rank]
            if length not in by_length:
                fields = [have[-1][1] for have in by_length.values()]
                raise ConfigError(
                    f"cp_style space: {class_name(module)} gets {length} rows on this rank, and in the trial its "
                    f"field had {fields} in all: give the model the rank's rows (mmm.parallel.own_rows) of fields of "
                    f"the size that the plan says"
                )
            yield Axis(dim, by_length[length], self.rank, self.group)

    def row_axis(self, module: nn.Module, x: Tensor, first: int = 0) -> Axis | None:
        """The one of `axes` that is split. None if none is."""
        for axis in self.axes(module, x, first):
            if axis.group is not None:
                return axis
        return None


def note(module: nn.Module, split: Mapping[int, Bounds]) -> None:
    """Remember on a module how dims of its input are split.

    Args:
        split: maps each dim that is split to its rows on each rank.

    Raises:
        ConfigError: another field, with other rows, looks the same on some rank.
    """
    notes: Notes = module.__dict__.setdefault(NOTES, {})
    for dim, have in split.items():
        by_rank = notes.setdefault(dim, [{} for _ in have])
        for (first, end), by_length in zip(have, by_rank, strict=True):
            other = by_length.setdefault(end - first, have)
            # Levels of a model share a module only where their strips differ on every rank.
            if other != have:
                raise ConfigError(
                    f"cp_style space: {class_name(module)} gets fields of {have[-1][1]} and of {other[-1][1]} rows, of "
                    f"which a rank has {end - first} each: use a module for each size"
                )


def of_dim(value: Any, index: int) -> Any:
    """What holds for one dim of space, of what PyTorch's modules have as one value for all dims, or as a tuple."""
    if isinstance(value, Sequence):
        return value[index]
    return value


@contextmanager
def other_values(attributes: dict[str, Any], changes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a dict of attributes has other values."""
    own = {name: attributes[name] for name in changes}
    attributes.update(changes)
    try:
        yield
    finally:
        attributes.update(own)
