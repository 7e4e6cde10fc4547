"""What the model computes on one process, and how far the ranks may be off from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import NOTHING, scale_of, size_of, worst
from mmm_verify.noise import MARGIN, MARGIN_16_BITS, Noise, largest_element, largest_gradient
from mmm_verify.observe import Observed

# Relative, for float64.
TOLERANCE = 1e-9
# Relative: a noise floor above this is not rounding.
LOOSE = 1e-4
# A difference has to be so many times the noise floor to count.
FLOOR = 32
# How many times more the second step may be off than the first: it starts from what the first has rounded.
LATER = 100
# Relative: two tensors this close are the same, when a difference is explained.
ALIKE = 1e-7


@dataclass
class Reference:
    """What one process computes.

    Attributes:
        state: the weights that every rank begins with, by name.
        observed: the steps on the full batch.
        samples: number of samples in the batch.
        dtype: the type that it computes in.
        floor: parameter → how far its gradient moves when the batch is split, relative.
        loss_floor: how far the loss moves when the batch is split, relative.
        loss_scale: the largest loss of the batch and its parts: the loss of the batch itself may be 0.
        only_rounding: parameters whose gradient is nothing but rounding, as the bias in front of a BatchNorm has one.
            Their differences are relative to the model's largest gradient. Empty in low precision, which has `noise`.
        has_dropout: whether the model draws random numbers in training, as dropout does. They are off in `observed`.
        evaluating: whether the model is compared in evaluation mode.
        split: what splitting the batch changes, in words; empty if it was not split.
        dtypes: see `Observed`.
        noise: how far rounding moves the first step, and the second. Empty in float64.
        output_noise: module → how far rounding moves its outputs, relative. Empty in float64.
        computes_in: the type with the fewest digits that the model computes in, such as bf16 under autocast.
        reason: why nothing can be compared; empty if it can.
        notes: what a reader of the verdict has to know.
    """

    state: dict[str, Tensor]
    observed: Observed
    samples: int
    dtype: torch.dtype = torch.float64
    floor: dict[str, float] = field(default_factory=dict)
    loss_floor: float = 0.0
    loss_scale: float = 0.0
    only_rounding: set[str] = field(default_factory=set)
    has_dropout: bool = False
    evaluating: bool = False
    split: str = ""
    dtypes: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    noise: list[Noise] = field(default_factory=list)
    output_noise: dict[str, float] = field(default_factory=dict)
    computes_in: torch.dtype = torch.float64
    reason: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def margin(self) -> int:
        """How many times the noise a difference has to be to count."""
        if self.computes_in.itemsize == 2:
            return MARGIN_16_BITS
        return MARGIN

    def tolerance(self, step: int = 0) -> Tolerance:
        """How far what the first step computes may be off (0), or the second (1)."""
        if self.noise:
            return measured_tolerance(self, step)
        return exact_tolerance(self, step)

    def output_tolerance(self, module: str) -> float:
        """How far a module's output may be off, relative to its largest element."""
        return max(ALIKE, self.margin * self.output_noise.get(module, 0.0))

    def tolerances(self) -> dict[str, Any]:
        """Every tolerance, by stage and, where a stage has several tensors, by name. All are relative."""
        by_stage: dict[str, Any] = {}
        for step, prefix in enumerate(("", "step 2: ")):
            tolerance = self.tolerance(step)
            # That of the second step is the loss after the first one.
            by_stage[f"{prefix}loss"] = tolerance.loss
            by_stage[f"{prefix}norm"] = tolerance.norm
            by_stage[f"{prefix}gradients"] = dict(tolerance.gradients)
            by_stage[f"{prefix}weights"] = {name: tolerance.weight(name) for name in self.step(step).after}
        return by_stage

    def step(self, step: int) -> Observed:
        """What was seen of the first step (0) or the second (1)."""
        second = self.observed.second
        if step and second is not None:
            return second
        return self.observed

    @property
    def largest_gradient(self) -> float:
        """The largest magnitude of an element of any gradient after clipping; 0 if there is no gradient."""
        return largest_element(self.observed.gradients.values())


@dataclass(frozen=True)
class Tolerance:
    """How far what one step computes may be off, relative.

    Attributes:
        loss: the loss before the step's update.
        norm: a norm that the step clips by.
        gradients: parameter → its gradient, relative to `scale`.
        weights: parameter or buffer → its value after the step, relative to its largest element.
        small: parameters in whose gradient a wrong factor would not be seen: it is relative to `largest`.
        largest: the model's largest gradient.
        nothing: relative to `largest`: a gradient that is no larger is 0 but for rounding.
    """

    loss: float
    norm: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    small: Set[str]
    largest: float
    nothing: float

    def gradient(self, name: str) -> float:
        """How far a parameter's gradient may be off, relative to `scale`."""
        return _of(self.gradients, name)

    def weight(self, name: str) -> float:
        """How far a parameter or buffer may be off after a step, relative to its largest element."""
        return _of(self.weights, name)

    def scale(self, name: str, gradient: Tensor) -> float:
        """The size that a gradient's differences are divided by: its largest element, or the model's.

        Args:
            name: the parameter.
            gradient: its full gradient, before or after clipping.
        """
        if name in self.small:
            return self.largest
        return scale_of(gradient, self.largest, self.nothing)

    def is_nothing(self, name: str, gradient: Tensor) -> bool:
        """Whether a gradient is 0 but for rounding."""
        return name in self.small or size_of(gradient) <= self.nothing * self.largest


def exact_tolerance(reference: Reference, step: int) -> Tolerance:
    """In float64: a number, unless splitting the batch has moved a gradient further."""
    gradients = {}
    for name in reference.observed.gradients:
        gradients[name] = max(TOLERANCE, FLOOR * _of(reference.floor, name))
        if step:
            gradients[name] *= LATER
    return Tolerance(
        loss=max(TOLERANCE, FLOOR * reference.loss_floor),
        norm=worst(gradients.values()),
        gradients=gradients,
        weights=gradients,
        small=reference.only_rounding,
        largest=reference.largest_gradient,
        nothing=NOTHING,
    )


def measured_tolerance(reference: Reference, step: int) -> Tolerance:
    """In fewer digits: a multiple of how far rounding moves each tensor on one device."""
    noise = reference.noise[step]
    margin = reference.margin
    return Tolerance(
        loss=margin * noise.loss,
        norm=margin * noise.norm,
        gradients={name: margin * moved for name, moved in noise.gradients.items()},
        weights={name: margin * moved for name, moved in noise.weights.items()},
        small=noise.unresolved,
        largest=largest_gradient(reference.step(step)),
        nothing=0.0,
    )


def rounding_mask(reference: Reference, tolerances: Sequence[Tolerance], name: str) -> Tensor | None:
    """A mask of a weight's elements whose gradient is only rounding. None if it has no gradient.

    Such an element cannot be compared after the step: AdamW divides by the gradient's size, and makes a whole step of
    rounding, in either direction.

    Args:
        tolerances: those of the steps so far.
        name: the weight.
    """
    mask = None
    # The tolerance of the step that is compared, also for the gradient of the step before it.
    near = tolerances[-1].gradient(name)
    for index, tolerance in enumerate(tolerances):
        gradient = reference.step(index).gradients.get(name)
        if gradient is None:
            continue
        sizes = gradient.local.abs()
        near_zero = sizes <= near * tolerance.scale(name, gradient.local)
        # Elements of exactly 0, as for the rows of an embedding that no sample has, are not moved.
        if not near_zero.all() or not sizes.any():
            near_zero &= sizes > 0
        mask = near_zero if mask is None else mask | near_zero
    return mask


def _of(floors: Mapping[str, float], name: str) -> float:
    """The floor of a name. One without a floor of its own, as a parameter without a gradient, gets the worst."""
    if name in floors:
        return floors[name]
    return worst([0.0, *floors.values()])
