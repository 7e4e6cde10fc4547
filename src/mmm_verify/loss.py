"""Compares the losses of the ranks with the loss of the batch: is each of them it, or is their mean or sum?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import relative, same_elements, size_of
from mmm_verify.locate import joined_calls, of_samples, samples_of_rank
from mmm_verify.observe import LocalTensor
from mmm_verify.rank import RankObserved
from mmm_verify.reference import Reference, innermost_first
from mmm_verify.relations import reduced, times
from mmm_verify.subject import Subject

MEAN, SUM = "mean", "sum"
EXACT = 1e-12  # relative: ranks with other samples have one loss, since they have averaged or added it up
# Axes whose ranks have parts of each sample, or stages that have losses of their own. Only the others are asked why
# their ranks, which have the same samples, have different losses.
PARTS_OF_SAMPLES = ("cp", "sp", "context", "sequence", "seq", "ring", "ulysses", "pp", "pipeline", "stage")
POSITIONS, CHANNELS = "positions", "channels"

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class LossReading:
    """How the ranks' losses are to that of the batch.

    Attributes:
        reading: what of them it is, such as ``the mean over dp``; empty where each of them is it.
        wrong: what they are instead, in words; empty where they are right.
        error: relative.
        axes: those whose ranks have different losses.
    """

    reading: str = ""
    wrong: str = ""
    error: float = math.inf
    axes: tuple[str, ...] = ()


class Losses:
    """Reads the ranks' losses.

    Args:
        batch: the global batch, to know which samples a rank has.
    """

    def __init__(self, subject: Subject, reference: Reference, ranks: Sequence[RankObserved], batch: Any) -> None:
        self.subject, self.reference, self.ranks, self.batch = subject, reference, ranks, batch

    def read(self, losses: Sequence[LocalTensor | None], expected: Tensor, tolerance: float) -> LossReading:
        """Compare.

        Over an axis whose ranks have one and the same loss, nothing is added up or averaged. Over the others the loss
        of the batch is the mean, or the sum, of theirs.

        Args:
            losses: by rank; None where it has none. expected: on one device. tolerance: relative.
        """
        scale = max(size_of(expected), self.reference.loss_scale)
        values = self._by_coordinates(losses)
        if not values:
            return LossReading(wrong="no rank has one")
        axes = []
        for index, axis in enumerate(self.subject.axes):
            groups = _groups(values, index)
            if axis in self.subject.batch_axes:
                common = [_common(group, EXACT * scale) for group in groups.values()]
            else:
                common = [_common(_nonzero(group), tolerance * scale) for group in groups.values()]
            if any(value is None for value in common):
                axes.append(axis)
            else:
                values = {place: value for place, value in zip(groups, common, strict=True) if value is not None}
        best = LossReading()
        for operations in itertools.product((MEAN, SUM), repeat=len(axes)):
            readings = dict(zip(axes, operations, strict=True))
            value = self._reduce(values, readings)
            error = relative(value, expected.reshape(()).double(), scale)
            if error < best.error:
                best = LossReading(_in_words(readings), self._not_allowed(readings, values), error, tuple(axes))
        if best.error <= tolerance:
            return replace(best, error=math.inf) if best.wrong else best
        return LossReading(wrong=self._wrong(values, axes, expected), error=best.error, axes=tuple(axes))

    def _by_coordinates(self, losses: Sequence[LocalTensor | None]) -> dict[Coordinates, Tensor]:
        values = {}
        for rank, place in enumerate(self.subject.places):
            value = reduced(losses, rank)
            if value is not None and value.numel() == 1:
                values[tuple(place.values())] = value.reshape(()).double()
        return values

    def _reduce(self, values: Mapping[Coordinates, Tensor], readings: Mapping[str, str]) -> Tensor:
        for index, axis in enumerate(self.subject.axes):
            if axis in readings:
                stacks = {place: torch.stack(group) for place, group in _groups(values, index).items()}
                values = {
                    place: stack.mean() if readings[axis] == MEAN else stack.sum() for place, stack in stacks.items()
                }
        (value,) = values.values()
        return value

    def _not_allowed(self, readings: Mapping[str, str], values: Mapping[Coordinates, Tensor]) -> str:
        """Whether the ranks of some axis have the same samples whole, and yet different losses. In words, or empty."""
        for axis, operation in readings.items():
            if axis in self.subject.batch_axes or set(axis.lower().split("_")) & set(PARTS_OF_SAMPLES):
                continue
            divided = self._divides(axis)
            if divided == POSITIONS or (divided == CHANNELS and operation == SUM):
                continue
            group = next(iter(_groups(values, list(self.subject.axes).index(axis)).values()))
            digits = ", ".join(f"{value.item():.9g}" for value in group)
            return (
                f"the ranks of {axis} have different losses, {digits}, and the same samples: the {operation} of them "
                "is right, and no rank has it"
            )
        return ""

    def _divides(self, axis: str) -> str:
        """Of what the ranks of an axis have a part each: positions of the samples, or channels of the output. Empty
        where they compute the same."""
        group = self.subject.group(0, axis)
        first = self.ranks[group[0]].batch
        for other in group[1:]:
            batch = self.ranks[other].batch
            if len(batch) != len(first) or not all(map(same_elements, batch, first)):
                return POSITIONS
        # The last output before the loss.
        for name in reversed(innermost_first(self.reference.observed)):
            calls = self.reference.observed.outputs[name]
            if len(calls) != 1 or not calls[0] or calls[0][0].local.ndim < 2:
                continue
            output = joined_calls(self.ranks[group[0]], name, 0)
            if output is None:
                continue
            rows = samples_of_rank(self.subject, self.reference, self.ranks, self.batch, group[0])
            full = of_samples(calls[0][0].local, rows, self.reference.samples)
            if output.local.ndim != full.ndim or output.local.shape == full.shape:
                return ""
            return CHANNELS if output.local.shape[:-1] == full.shape[:-1] else POSITIONS
        return ""

    def _wrong(self, values: Mapping[Coordinates, Tensor], axes: Sequence[str], expected: Tensor) -> str:
        """What losses are that are not right."""
        mean = self._reduce(values, dict.fromkeys(axes, MEAN)).item()
        total = self._reduce(values, dict.fromkeys(axes, SUM)).item()
        ought = expected.item()
        over = " and ".join(axes)
        nearest = mean
        where = f"in the mean over {over}" if axes else "on every rank"
        if axes and _times_off(total, ought) < _times_off(mean, ought):
            nearest = total
            where = f"in the sum over {over}"
        factor = times(nearest / ought, self.subject) if ought else ""
        if "size" in factor:
            return f"is {nearest:.9g} {where}: {factor} what it is on one device, {ought:.9g}"
        if axes:
            return f"is {mean:.9g} in the mean over {over}, {total:.9g} in the sum, and {ought:.9g} on one device"
        return f"is {mean:.9g} on every rank, and {ought:.9g} on one device"


def _times_off(value: float, ought: float) -> float:
    """By how many powers of e a value is off; infinite where it is 0, not finite or has the other sign."""
    factor = value / ought if ought else 0.0
    return abs(math.log(factor)) if 0 < factor < math.inf else math.inf


def _groups(values: Mapping[Coordinates, Tensor], index: int) -> dict[Coordinates, list[Tensor]]:
    """The values of ranks that differ in one coordinate alone. It becomes 0."""
    groups: dict[Coordinates, list[Tensor]] = {}
    for place, value in values.items():
        groups.setdefault((*place[:index], 0, *place[index + 1 :]), []).append(value)
    return groups


def _nonzero(group: Sequence[Tensor]) -> Sequence[Tensor]:
    """Without ranks that have a loss of 0, as a pipeline's first stages may."""
    return [value for value in group if value != 0] or group


def _common(group: Sequence[Tensor], near: float) -> Tensor | None:
    """The value that all have. None where they differ."""
    return group[0] if all(abs(value - group[0]) <= near for value in group) else None


def _in_words(readings: Mapping[str, str]) -> str:
    means = [axis for axis, operation in readings.items() if operation == MEAN]
    sums = [axis for axis, operation in readings.items() if operation == SUM]
    phrases = [f"the {kind} over {' and '.join(of)}" for kind, of in ((MEAN, means), (SUM, sums)) if of]
    return " and ".join(phrases)
