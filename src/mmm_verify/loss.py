"""Compares the losses of the ranks with the loss of the batch: is each of them equal to it, or is their mean or sum?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmm_verify.difference import relative, same_elements, size_of
from mmm_verify.locate import joined_calls, of_samples, samples_of_rank
from mmm_verify.observe import LocalTensor, innermost_first
from mmm_verify.relations import reduced, times
from mmm_verify.seen import Seen
from mmm_verify.subject import is_named

MEAN = "mean"
SUM = "sum"
# What the ranks of an axis may have a part each of.
POSITIONS = "positions"
CHANNELS = "channels"
# Relative: ranks with other samples, or other parts of them, have this nearly one loss only if they have averaged it
# or added it up.
EXACT = 1e-12
# Axes whose ranks have parts of each sample, or are stages with losses of their own. Along other axes, ranks with the
# same samples and different losses have to be explained.
PARTS_OF_SAMPLES = ("cp", "sp", "context", "sequence", "seq", "ring", "ulysses", "pp", "pipeline", "stage")

Coordinates = tuple[int, ...]
# Losses by the coordinates of the ranks that have them.
Values = Mapping[Coordinates, Tensor]


@dataclass(frozen=True)
class LossReading:
    """How the ranks' losses make up the loss of the batch.

    Attributes:
        reading: which of their means and sums it is, such as ``the mean over dp``; empty if each of them equals it.
        wrong: what they are instead, in words; empty if they are right.
        error: how far the nearest reading is from the loss of the batch, relative.
        axes: the axes whose ranks have different losses.
    """

    reading: str = ""
    wrong: str = ""
    error: float = math.inf
    axes: tuple[str, ...] = ()


class Losses:
    """Reads the ranks' losses.

    Args:
        seen: what is compared, of either step.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.subject = seen.subject

    def read(self, losses: Sequence[LocalTensor | None], expected: Tensor, tolerance: float) -> LossReading:
        """Find the means and sums over axes that give the loss of the batch.

        Over an axis whose ranks all have one loss, nothing is averaged or added up. Over each other axis, the loss of
        the batch may be the mean or the sum of the ranks' losses.

        Args:
            losses: by rank; None if it has none.
            expected: the loss on one device.
            tolerance: relative.
        """
        # The loss of the batch may be 0 where those of its parts are not.
        scale = max(size_of(expected), self.seen.reference.loss_scale)
        values: Values = self._by_coordinates(losses)
        if not values:
            return LossReading(wrong="no rank has one")
        # A loss of 0 is passed over, where other ranks have another.
        everywhere = "on every rank"
        if 0 < sum(value != 0 for value in values.values()) < self.subject.n_ranks:
            everywhere = "on each rank whose loss is not 0"
        axes = []
        for dim, axis in enumerate(self.subject.axes):
            common = self._common_over(values, dim, axis, tolerance, scale)
            if common is None:
                axes.append(axis)
            else:
                values = common
        best = LossReading()
        # Every combination of a mean or a sum over each of these axes.
        for operations in itertools.product((MEAN, SUM), repeat=len(axes)):
            operation_over = dict(zip(axes, operations, strict=True))
            value = self._reduce(values, operation_over)
            error = relative(value, expected.reshape(()).double(), scale)
            if error < best.error:
                wrong = self._not_allowed(operation_over, values)
                best = LossReading(_in_words(operation_over), wrong, error, tuple(axes))
        if not best.error <= tolerance:
            wrong = self._wrong(values, axes, expected, tolerance, everywhere)
            return LossReading(wrong=wrong, error=best.error, axes=tuple(axes))
        if best.wrong:
            # The number is right: no distance belongs to what is wrong.
            return replace(best, error=math.inf)
        return best

    def _common_over(
        self,
        values: Values,
        dim: int,
        axis: str,
        tolerance: float,
        scale: float,
    ) -> Values | None:
        """One loss for each group of ranks along an axis. None if the ranks of a group have different losses."""
        other_samples = axis in self.subject.batch_axes
        near = tolerance * scale
        # Losses of different samples, or of different parts of them, may be near each other by chance.
        if other_samples or is_named(axis, PARTS_OF_SAMPLES):
            near = EXACT * scale
        values_of_groups = {}
        for coordinates, group in _groups(values, dim).items():
            # A pipeline's first stages may have a loss of 0.
            nonzero = [value for value in group if value != 0]
            if nonzero and not other_samples:
                group = nonzero
            common = _common(group, near)
            if common is None:
                return None
            values_of_groups[coordinates] = common
        return values_of_groups

    def _by_coordinates(self, losses: Sequence[LocalTensor | None]) -> dict[Coordinates, Tensor]:
        """The losses of ranks that have one, as scalars in float64."""
        values = {}
        for rank, coordinates in enumerate(self.subject.coordinates):
            value = reduced(losses, rank)
            if value is not None and value.numel() == 1:
                values[tuple(coordinates.values())] = value.reshape(()).double()
        return values

    def _reduce(self, values: Values, operation_over: Mapping[str, str]) -> Tensor:
        """Take the mean or the sum of the losses over some axes, outermost first, down to one loss."""
        for dim, axis in enumerate(self.subject.axes):
            if axis not in operation_over:
                continue
            reduced_values = {}
            for coordinates, group in _groups(values, dim).items():
                stack = torch.stack(group)
                if operation_over[axis] == MEAN:
                    reduced_values[coordinates] = stack.mean()
                else:
                    reduced_values[coordinates] = stack.sum()
            values = reduced_values
        # Over the axes that are left, the ranks have one loss.
        (value,) = values.values()
        return value

    def _not_allowed(self, operation_over: Mapping[str, str], values: Values) -> str:
        """Say whether the ranks of an axis have the same full samples, and yet different losses. Empty if not."""
        for axis, operation in operation_over.items():
            if axis in self.subject.batch_axes or is_named(axis, PARTS_OF_SAMPLES):
                continue
            divided = self._divides(axis)
            # The losses of a rank's own channels add up. Their mean would only be right by chance.
            if divided == POSITIONS or (divided == CHANNELS and operation == SUM):
                continue
            dim = list(self.subject.axes).index(axis)
            group = next(iter(_groups(values, dim).values()))
            digits = ", ".join(f"{value.item():.9g}" for value in group)
            return (
                f"the ranks of {axis} have different losses, {digits}, for the same samples: the {operation} of them "
                "is right, but no rank has it"
            )
        return ""

    def _divides(self, axis: str) -> str:
        """Whether the ranks of an axis have a part each of the positions, or of the output's channels.

        Returns:
            POSITIONS or CHANNELS; empty if the ranks compute the same.
        """
        reference = self.seen.reference
        ranks = self.seen.ranks
        first = ranks[0].batch
        for other in self.subject.group(0, axis):
            batch = ranks[other].batch
            if len(batch) != len(first) or not all(map(same_elements, batch, first)):
                return POSITIONS
        # The last output before the loss shows what a rank's loss is computed from.
        for name in reversed(innermost_first(reference.observed)):
            calls = reference.observed.outputs[name]
            if len(calls) != 1 or not calls[0]:
                continue
            full = calls[0][0].local
            if full.ndim < 2:
                continue
            output = joined_calls(ranks[0], name, 0)
            if output is None:
                continue
            full = of_samples(full, samples_of_rank(self.seen, 0), reference.samples)
            # (…, channels)
            local_shape = output.local.shape
            if len(local_shape) != full.ndim or local_shape == full.shape:
                return ""
            if local_shape[:-1] == full.shape[:-1]:
                return CHANNELS
            return POSITIONS
        return ""

    def _wrong(
        self,
        values: Values,
        axes: Sequence[str],
        expected: Tensor,
        tolerance: float,
        everywhere: str,
    ) -> str:
        """Say what wrong losses are. A factor is only known to within the tolerance."""
        alike = 0.0 if self.subject.exact else tolerance
        mean = self._reduce(values, dict.fromkeys(axes, MEAN)).item()
        total = self._reduce(values, dict.fromkeys(axes, SUM)).item()
        right = expected.item()
        over = " and ".join(axes)
        nearest = mean
        where = everywhere
        if axes and _times_off(total, right) < _times_off(mean, right):
            nearest = total
            where = f"in the sum over {over}"
        elif axes:
            where = f"in the mean over {over}"
        # A right loss of 0 has no multiples.
        if right:
            factor = times(nearest / right, self.subject, alike)
            # A factor of the size of an axis says more than the numbers.
            if "size" in factor:
                return f"is {nearest:.9g} {where}: {factor} what it is on one device, {right:.9g}"
        if axes:
            return f"is {mean:.9g} in the mean over {over}, {total:.9g} in the sum, but {right:.9g} on one device"
        return f"is {mean:.9g} {everywhere}, but {right:.9g} on one device"


def _times_off(value: float, expected: float) -> float:
    """By how many powers of e a value is off. Infinite if it is 0, not finite or of the other sign."""
    if not expected:
        return math.inf
    factor = value / expected
    if not 0 < factor < math.inf:
        return math.inf
    return abs(math.log(factor))


def _groups(values: Values, dim: int) -> dict[Coordinates, list[Tensor]]:
    """The values of ranks that differ only in the coordinate on axis `dim`, which is 0 in the keys."""
    groups: dict[Coordinates, list[Tensor]] = {}
    for coordinates, value in values.items():
        key = list(coordinates)
        key[dim] = 0
        groups.setdefault(tuple(key), []).append(value)
    return groups


def _common(group: Sequence[Tensor], near: float) -> Tensor | None:
    """The value that all of a group have, to `near`. None if they differ."""
    if all(abs(value - group[0]) <= near for value in group):
        return group[0]
    return None


def _in_words(operation_over: Mapping[str, str]) -> str:
    """``{"dp": MEAN, "cp": SUM}`` → "the mean over dp and the sum over cp"."""
    phrases = []
    for operation in (MEAN, SUM):
        axes = [axis for axis, chosen in operation_over.items() if chosen == operation]
        if axes:
            phrases.append(f"the {operation} over {' and '.join(axes)}")
    return " and ".join(phrases)
