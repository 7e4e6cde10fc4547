"""The ranks that a field is split over, and what a module knows of the fields that it gets.

A strip does not know its field: 5 rows may be of 20 or of 21. So a trial of the whole model (`trial`), before it
trains, notes on each module which dims of its input are split, and how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mmm.errors import ConfigError
from mmm.nn.init import class_name
from mmm.parallel.cp.space.strips import Bounds, own_rows
from mmm.parallel.cp.space.take import Axis

# Maps a dim of a module's input to the groups' index, and to all the ways in which this dim may be split.
Notes = dict[int, tuple[int, list[Bounds]]]
# Name of a module's attribute.
NOTES = "field_notes"


class Split:
    """The ranks that a field is split over: along its rows, and with two groups along its columns as well.

    Attributes:
        groups: one for each dim of space that is split, the first dim first.
        places: this rank's place in each.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        self.groups = list(groups)
        self.places = [group.rank() for group in groups]

    def own(self, field: Tensor, dim: int) -> Tensor:
        """This rank's part of a full field, whose first dim of space is `dim`. A view."""
        for index, group in enumerate(self.groups):
            field = own_rows(field, group.size(), self.places[index], dim + index)
        return field

    def axis(self, module: nn.Module, x: Tensor, dim: int) -> Axis:
        """How a dim of a module's input lies over the ranks.

        Raises:
            ConfigError: the trial has seen no such input of this module.
        """
        notes: Notes | None = getattr(module, NOTES, None)
        if notes is None:
            raise ConfigError(
                f"cp_style space: {class_name(module)} did not run in the trial before the training; have every "
                f"forward call the same modules"
            )
        length = x.shape[dim]
        if dim not in notes:
            return Axis(dim, ((0, length),))
        index, choices = notes[dim]
        # Levels of a model share a module only where their strips differ on every rank (`note`).
        for have in choices:
            first, end = have[self.places[index]]
            if end - first == length:
                return Axis(dim, have, self.places[index], self.groups[index])
        lengths = ", ".join(str(have[-1][1]) for have in choices)
        raise ConfigError(
            f"cp_style space: {class_name(module)} gets {length} rows on this rank, and its field has {lengths} in "
            f"all: every field has the size that the plan says"
        )

    def axes(self, module: nn.Module, x: Tensor, first: int = 2) -> Iterator[Axis]:
        """`axis` of each dim of x from `first` on: of (batch, channels, …) each dim of space."""
        for dim in range(first, x.ndim):
            yield self.axis(module, x, dim)


def note(module: nn.Module, split: Mapping[int, Bounds], index: int) -> None:
    """Remember on a module how dims of its input are split.

    Args:
        split: maps each dim that is split to its rows on each rank.
        index: which of the groups split them.

    Raises:
        ConfigError: another field, with other rows, looks the same on some rank.
    """
    notes: Notes = module.__dict__.setdefault(NOTES, {})
    for dim, have in split.items():
        _, choices = notes.setdefault(dim, (index, []))
        if have in choices:
            continue
        for other in choices:
            _refuse_alike(module, have, other)
        choices.append(have)


def _refuse_alike(module: nn.Module, have: Bounds, other: Bounds) -> None:
    for (first, end), (other_first, other_end) in zip(have, other, strict=True):
        if end - first == other_end - other_first:
            raise ConfigError(
                f"cp_style space: {class_name(module)} gets fields of {have[-1][1]} and of {other[-1][1]} rows, of "
                f"which a rank has {end - first} each: use a module for each size"
            )


def of_dim(value: Any, index: int) -> Any:
    """What holds for one dim of space, of what PyTorch's modules have as one value for all dims, or as a tuple."""
    if isinstance(value, Sequence):
        return value[index]
    return value
