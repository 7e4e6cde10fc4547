"""The model on one process: what it computes, and how exactly that repeats itself, which limits every comparison."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmm_verify.difference import (
    NOTHING,
    ROUNDING,
    distance,
    finite_size_of,
    relative,
    same_elements,
    scale_of,
    size_of,
    worst,
)
from mmm_verify.dtypes import dtype_name, in_dtype, widest
from mmm_verify.errors import ConfigError, describe, is_for_user
from mmm_verify.noise import (
    DRAWS,
    MARGIN,
    MARGIN_16_BITS,
    TOO_LOOSE,
    Noise,
    gradient_noise,
    largest_element,
    largest_gradient,
    loss_noise,
    moved_by_rounding,
    norm_noise,
    output_noise,
    weight_noise,
)
from mmm_verify.observe import Observed, named_parameters, observe, without_dropout
from mmm_verify.subject import SAME_SAMPLES, Subject, check_parts, in_reverse, is_named, part_of, samples_of
from mmm_verify.torch_private import map_tensors, tensors_in, tree_map_only

SEED = 0
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
# Two runs of one model may differ by so many roundings of 16 bits: kernels add up in an order that depends on where in
# memory a tensor lies.
ROUNDING_16_BITS = 8
# Copies of the parameters in each process: weights, gradients, and what is recorded of both, for two steps.
COPIES = 6


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


def seed_all(seed: int) -> None:
    """Seed the generators that a program draws from: PyTorch's, Python's and, if it is imported, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def make_model(subject: Subject, state: Mapping[str, Tensor] | None, dropout: bool, evaluating: bool) -> nn.Module:
    """Make the model in the type that is verified.

    Args:
        subject: whose model function is called.
        state: the weights to give it. None: its own, with a little noise.
        dropout: whether dropout stays on.
        evaluating: whether to put it into evaluation mode.

    Raises:
        ConfigError: the model's function raises, does not return a module with values on the CPU, or the model is too
            large for this host's memory.
    """
    seed_all(SEED)
    try:
        model = subject.model_fn()
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(f"the model's function raises {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model's function returns {type(model).__name__}, and has to return an nn.Module")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.device.type != "cpu" or is_lazy(tensor):
            raise ConfigError(f"{name} is on {tensor.device.type} or has no size yet: the model has to have its values")
    if state is None:
        _check_memory(model, subject)
    map_tensors(model, lambda tensor: in_dtype(tensor, subject.dtype))
    # The function may return one and the same model each time, with the last step's gradients.
    model.zero_grad()
    _set_mode(model, evaluating)
    if not dropout and not subject.keeps_dropout:
        without_dropout(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(SEED)
        # A dict by canonical name: a tied parameter gets its noise once for each name, in the same order on every rank.
        parameters = dict(named_parameters(model))
        for name, parameter in parameters.items():
            if state is not None:
                parameter.copy_(state[name])
            elif parameter.is_floating_point() or parameter.is_complex():
                _add_noise(parameter, generator, subject.noise)
        for name, buffer in model.named_buffers():
            if state is not None and name in state:
                buffer.copy_(state[name])
    return model


def _add_noise(parameter: nn.Parameter, generator: torch.Generator, size: float) -> None:
    """Add noise to a parameter, in place, of this size relative to the parameter's spread."""
    spread = 0.0
    if parameter.numel() > 1:
        spread = parameter.std().item()
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    # A constant parameter, as of a norm, has no spread: its noise is of this size itself.
    parameter.add_(noise * size * (spread or 1.0))


def _set_mode(model: nn.Module, evaluating: bool) -> None:
    """Set evaluation mode, or keep the mode that the model's function has left each module in."""
    if evaluating:
        model.eval()
    elif model.training:
        # A class may freeze modules, such as batch norms, in its own train(): call it, as a training program does.
        # Modules that the model's function has frozen itself stay frozen.
        frozen = [module for module in model.modules() if not module.training]
        model.train()
        for module in frozen:
            module.training = False


def total_memory() -> int:
    """The memory of this host, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(model: nn.Module, subject: Subject) -> None:
    """Raise ConfigError if the ranks' models, each of which is full until it is sharded, need more than all memory.

    Where others use some of it, or a job may take less, the system ends a rank, and the verdict says so.
    """
    elements = sum(parameter.numel() for parameter in model.parameters())
    n_ranks = subject.n_ranks
    # Both in bytes.
    needed = subject.dtype.itemsize * COPIES * n_ranks * elements
    memory = total_memory()
    if needed > memory:
        plural = "s" if n_ranks > 1 else ""
        raise ConfigError(
            f"{elements:,} parameters in {dtype_name(subject.dtype)} take about {needed / 2**30:,.1f} GiB on "
            f"{n_ranks} rank{plural}, each of which begins with the full model, and this host has "
            f"{memory / 2**30:,.1f} GiB: verify it with fewer layers, or narrower"
        )


def make_batch(subject: Subject) -> Any:
    """Make the global batch, with its floats in the type that is verified, and complex numbers as precise.

    Raises:
        ConfigError: the batch's function raises, or returns nothing with samples.
    """
    seed_all(SEED)
    try:
        batch = subject.batch_fn()
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(f"the batch's function raises {describe(error)}") from error
    samples_of(batch)
    return tree_map_only(Tensor, lambda tensor: in_dtype(tensor, subject.dtype), batch)


def compute_reference(subject: Subject) -> Reference:
    """Run the model on one process, and compare it with itself: once more, with its batch split, and in reverse order.

    Raises:
        ConfigError: the model, the batch or the step cannot be used.
        LayoutError: the batch does not divide over the ranks.
    """
    batch = make_batch(subject)
    check_parts(subject, batch)
    model = make_model(subject, None, dropout=True, evaluating=False)
    has_dropout = not subject.keeps_dropout and without_dropout(model) and model.training
    state = {}
    for name, parameter in named_parameters(model):
        state[name] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        state[name] = buffer.clone()
    first = _observe_plain(subject, state, batch, seed=1, step=True)
    reference = Reference(state, first, samples_of(batch), subject.dtype, has_dropout=has_dropout)
    if not model.training:
        reference.notes.append(
            "the model's function returns it in evaluation mode, and it is compared in that mode: what dropout and "
            "batch statistics do in training is not seen"
        )
    if first.loss is None:
        raise ConfigError("the step's function returns None on one device: it has to return the loss")
    loss = first.loss.local
    if loss.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(loss.shape)}: it has to be one number, the mean")
    if all(gradient is None for gradient in first.gradients.values()):
        raise ConfigError("no parameter has a gradient on one device: does the loss depend on the model?")
    reference.reason = why_not_finite(first) or _why_dead(first)
    if reference.reason:
        return reference
    _note_what_is_not_seen(subject, reference)
    stages = (_repeat, _split, _measure_rounding)
    if not subject.exact:
        # In low precision, splitting is compared with the noise: that is measured first.
        stages = (_repeat, _measure_noise, _split)
    for compare in stages:
        compare(subject, reference, batch)
        if reference.reason:
            break
    return reference


def why_not_finite(observed: Observed) -> str:
    """Say which value on one device is NaN or infinite, and cannot be compared. Empty if there is none."""
    if observed.loss is not None and not torch.isfinite(observed.loss.local).all():
        return f"the loss on one device is {observed.loss.local.item()}"
    for name, gradient in observed.gradients.items():
        if gradient is not None and not torch.isfinite(gradient.local).all():
            return f"the gradient of {name} on one device is not finite"
    return ""


def _why_dead(observed: Observed) -> str:
    """Say why the loss does not depend on the weights, so that any other program would agree. Empty if it does."""
    assert observed.loss is not None
    loss = size_of(observed.loss.local)
    # A gradient times its weight: how far the loss moves if the weight is doubled.
    moves = []
    for name, gradient in observed.gradients.items():
        if gradient is not None:
            weight_size = size_of(observed.weights[name].local)
            moves.append(size_of(gradient.local) * weight_size)
    if worst(moves) > NOTHING * loss:
        return ""
    return (
        f"every gradient on one device is 0, and the loss is {loss:.6g} whatever the weights are: a program that does "
        "nothing would agree. Are all labels ignored, or is something multiplied by 0?"
    )


def _note_what_is_not_seen(subject: Subject, reference: Reference) -> None:
    """Add notes on parameters without a gradient, and on axes that may have been meant to split the batch."""
    without = []
    zero = []
    for name, gradient in reference.observed.gradients.items():
        if gradient is None:
            without.append(name)
        elif size_of(gradient.local) == 0:
            zero.append(name)
    if without:
        names = _first_and_count(without)
        reference.notes.append(
            f"{names} get no gradient on one device, from this batch and step: they are not compared"
        )
    if zero:
        names = _first_and_count(zero, "and of")
        reference.notes.append(
            f"the gradient of {names} is exactly 0 on one device, from this batch and step: that the ranks agree on it "
            "proves nothing"
        )
    for axis, size in subject.axes.items():
        if size > 1 and axis not in subject.batch_axes and not is_named(axis, SAME_SAMPLES):
            reference.notes.append(
                f"all ranks of {axis} have the same samples. If they should have different ones: --batch-axes {axis}"
            )


def _first_and_count(names: list[str], conjunction: str = "and") -> str:
    """The first of some names, and how many more there are: ``fc1.weight and 3 more``."""
    text = names[0]
    n_more = len(names) - 1
    if n_more:
        text += f" {conjunction} {n_more} more"
    return text


def _observe_plain(
    subject: Subject,
    state: Mapping[str, Tensor],
    batch: Any,
    seed: int,
    evaluating: bool = False,
    step: bool = False,
    dtypes: bool = False,
) -> Observed:
    """Run the plain model on a batch, with dropout off. See `observe`.

    Args:
        seed: seed for the random numbers that the step draws.
    """
    model = make_model(subject, state, dropout=False, evaluating=evaluating)
    seed_all(seed)
    try:
        return observe(subject, model, batch, None, step=step, dtypes=dtypes)
    # The user's code may raise anything.
    except Exception as error:
        if is_for_user(error):
            raise
        raise ConfigError(f"a step on one device raises {failure_of(error)}") from error


def failure_of(error: Exception) -> str:
    """Describe an error of the user's step, with what to change if that is known."""
    message = describe(error)
    # PyTorch's messages about two types that do not fit together.
    is_about_types = any(word in str(error) for word in ("dtype", "Double", "double"))
    if isinstance(error, RuntimeError) and is_about_types:
        message += (
            ". Everything is computed in float64: a .float() in the code gives float32; write .to(x.dtype) to get the "
            "type of x, or verify it with --dtype float32"
        )
    return message


def _repeat(subject: Subject, reference: Reference, batch: Any) -> None:
    """Run the model once more, with other random numbers: what differs draws some, or is not deterministic.

    In the first case the model is compared in evaluation mode, if it draws none there.
    """
    state = reference.state
    again = _observe_plain(subject, state, batch, seed=2)
    drawing = first_difference(reference.observed, again)
    if not drawing:
        return
    reference.evaluating = True
    reference.has_dropout = True
    reference.observed = _observe_plain(subject, state, batch, seed=1, evaluating=True, step=True)
    again = _observe_plain(subject, state, batch, seed=2, evaluating=True)
    still = first_difference(reference.observed, again)
    if not still:
        reference.notes.append(f"{drawing} draws random numbers in training: compared in evaluation mode")
        return
    # The same seed: what differs now is not drawn.
    again = _observe_plain(subject, state, batch, seed=1, evaluating=True)
    if first_difference(reference.observed, again):
        reference.reason = f"not deterministic: {still} gives something else the second time, on one device"
    else:
        reference.reason = (
            f"random numbers are drawn in evaluation mode too, first seen in {still}: draw them in the batch's "
            "function, so that one device and the ranks have the same"
        )


def _split(subject: Subject, reference: Reference, batch: Any) -> None:
    """Run the model on parts of the batch, and take the distance of their mean from the batch as the noise floor.

    If samples do not see each other, the mean of the parts' gradients is the gradient of the batch, up to rounding.
    """
    n_parts = 2
    if subject.n_parts > 1 and subject.local_batch_fn is None:
        n_parts = subject.n_parts
    if reference.samples % n_parts:
        # One sample in each part, unless that takes too many runs.
        if reference.samples > 8:
            return
        n_parts = reference.samples
    if n_parts == 1:
        return
    parts = []
    for index in range(n_parts):
        own = part_of(batch, index, n_parts)
        observed = _observe_plain(subject, reference.state, own, 1, reference.evaluating)
        parts.append(observed)
    full = reference.observed
    if all(_has_all_gradients(reference, observed) for observed in parts):
        reference.reason = _why_alike(subject, batch, n_parts)
        if reference.reason:
            return
    loss_sizes = []
    for observed in (full, *parts):
        if observed.loss is not None:
            loss_sizes.append(size_of(observed.loss.local))
    reference.loss_scale = worst(loss_sizes)
    reference.loss_floor = _loss_floor(reference, parts)
    reference.floor = _gradient_floors(reference, parts)
    floor = worst([reference.loss_floor, *reference.floor.values()])
    reference.split = f"; splitting the batch changes it by {floor:.0e}"
    if not subject.exact:
        _count_as_noise(reference, parts)
        return
    if floor <= TOLERANCE:
        return
    # Written with `not`, so that a floor of NaN does not pass for rounding.
    if not floor <= LOOSE:
        why = _why_parts_differ(reference, parts)
        reference.notes.append(f"{why}: a rank that has a part of them computes something else by itself")
        # The distance is not rounding: it is not a noise floor.
        reference.floor.clear()
        reference.loss_floor = 0.0
    else:
        # Parameters are listed in forward order: rounding in one module moves the gradients of all modules before it,
        # so the last one that has moved is where backward met it first.
        moved = [name for name, distance in reference.floor.items() if distance > TOLERANCE]
        where = ""
        if moved:
            where = f", first seen in the gradient of {moved[-1]}"
        reference.notes.append(
            f"the model itself is only right to {floor:.0e} (its batch split in {n_parts}): something in it computes "
            f"in less than float64{where}. Differences below {FLOOR} times that are not seen"
        )


def _count_as_noise(reference: Reference, parts: list[Observed]) -> None:
    """Raise the measured noise to what splitting the batch changes, unless samples see each other."""
    noise = reference.noise[0]
    times_off = [reference.loss_floor / noise.loss]
    for name, floor in reference.floor.items():
        if name not in noise.unresolved:
            times_off.append(floor / noise.gradients[name])
    # Rounding, unless it is far more than rounding has moved the gradients so far. Written with `not`, for NaN.
    if not worst(times_off) <= 2 * reference.margin:
        why = _why_parts_differ(reference, parts)
        reference.notes.append(f"{why}: a rank that has a part of them computes something else by itself")
        return
    noise.loss = max(noise.loss, reference.loss_floor)
    for name in set(reference.floor) - noise.unresolved:
        noise.gradients[name] = max(noise.gradients[name], reference.floor[name])


def _why_parts_differ(reference: Reference, parts: list[Observed]) -> str:
    """Say why the mean over parts of the batch is not that of the batch: samples see each other, or are counted."""
    module = first_unlike(reference, parts)
    if module:
        return f"{module} notices the other samples of a batch"
    if reference.loss_floor <= max(LOOSE, reference.tolerance().loss):
        return "the gradient of a batch is not the mean of its parts' gradients, as where the step clips it"
    return "the loss of a batch is not the mean of its parts' losses, such as a mean over a count that differs"


def _measure_rounding(subject: Subject, reference: Reference, batch: Any) -> None:
    """Raise the noise floors to the rounding of functions that compute in less than float64.

    If a split batch cannot measure it, because samples see each other or are counted, the batch in reverse can: that
    only changes the order of sums.
    """
    try:
        reverse = _observe_plain(subject, reference.state, in_reverse(batch), 1, reference.evaluating, dtypes=True)
    # Samples may not be exchangeable: the edges of a graph name its nodes by their positions.
    except ConfigError:
        return
    reference.dtypes = reverse.dtypes
    reference.only_rounding = _only_rounding(reference.observed, reverse)
    if reference.only_rounding:
        _note_only_rounding(reference, sorted(reference.only_rounding))
    if not reference.floor:
        loss_floor = _loss_floor(reference, [reverse])
        floors = _gradient_floors(reference, [reverse])
        if worst([loss_floor, *floors.values()]) <= LOOSE:
            reference.loss_floor = loss_floor
            reference.floor = floors
    assert reference.observed.loss is not None
    loss_dtype = reference.observed.loss.local.dtype
    # Losses with so few digits may be equal by chance: the floor is at least one rounding.
    if loss_dtype in (torch.bfloat16, torch.float16):
        reference.loss_floor = max(reference.loss_floor, torch.finfo(loss_dtype).eps)
    functions = sorted(function for function, dtype in reverse.dtypes if dtype == torch.float32)
    if not functions:
        return
    # Another order of the sums in float32 may change nothing here, and splitting them may on the ranks.
    rounding = torch.finfo(torch.float32).eps / 2
    reference.loss_floor = max(reference.loss_floor, rounding)
    for name in reference.observed.gradients:
        floor = reference.floor.get(name, 0.0)
        reference.floor[name] = max(floor, rounding)
    reference.notes.append(
        f"something in the model computes in float32 on one device too, such as {functions[-1]}: differences below "
        f"{FLOOR * rounding:.0e} are not seen"
    )


def _only_rounding(expected: Observed, reverse: Observed) -> set[str]:
    """Parameters whose gradient is nothing but rounding: the batch in reverse gives quite another one.

    Args:
        expected: the step on the batch.
        reverse: the step on the batch in reverse.
    """
    largest = largest_gradient(expected)
    names = set()
    for name in expected.gradients:
        gradient = expected.before_clipping(name)
        other = reverse.before_clipping(name)
        if gradient is None or other is None:
            continue
        size = size_of(gradient.local)
        # So small that it is measured by the largest gradient anyway.
        if size <= NOTHING * largest:
            continue
        off = distance(other.local, gradient.local)
        is_rounding = off <= TOLERANCE * largest
        if is_rounding and FLOOR * off > TOO_LOOSE * size:
            names.add(name)
    return names


def _note_only_rounding(reference: Reference, names: list[str]) -> None:
    """Add a note on gradients in which no mistake would be seen."""
    kind = dtype_name(reference.computes_in)
    reference.notes.append(
        f"the gradient of {_first_and_count(names, 'and of')} is small beside the largest one, and mostly rounding in "
        f"{kind}: a wrong factor in it is not seen"
    )


def _measure_noise(subject: Subject, reference: Reference, batch: Any) -> None:
    """Measure how far rounding moves all that is compared: by the batch in reverse, and by draws.

    A draw is a run in which each weight and each float of the batch is moved by one rounding, up or down at random.
    """
    state = reference.state
    evaluating = reference.evaluating
    plain = _observe_plain(subject, state, batch, 1, evaluating, dtypes=True)
    reference.dtypes = plain.dtypes
    # The model may compute in a type with fewer digits than its weights have, as under autocast.
    reference.computes_in = subject.dtype
    for _, dtype in plain.dtypes:
        if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(reference.computes_in).eps:
            reference.computes_in = dtype
    eps = torch.finfo(reference.computes_in).eps
    draws = []
    shifts: list[dict[str, Tensor]] = []
    # Samples may not be exchangeable: the edges of a graph name its nodes by their positions.
    with contextlib.suppress(ConfigError):
        reverse = _observe_plain(subject, state, in_reverse(batch), 1, evaluating, step=True)
        draws.append(reverse)
        # In this draw, no weight was moved.
        shifts.append({})
    generator = torch.Generator().manual_seed(SEED)

    def move(tensor: Tensor) -> Tensor:
        return moved_by_rounding(tensor, eps, generator)

    def move_values(tensor: Tensor) -> Tensor:
        moved = move(tensor)
        if not tensor.is_floating_point():
            return moved
        # A whole number may stand for something: -100 where there is no target.
        return moved.where(tensor.frac() != 0, tensor)

    for _ in range(DRAWS):
        moved = dict(state)
        shift = {}
        for name in sorted(reference.observed.parameters):
            moved[name] = move(state[name])
            shift[name] = widest(moved[name]) - widest(state[name])
        shifts.append(shift)
        moved_batch = tree_map_only(Tensor, move_values, batch)
        draw = _observe_plain(subject, moved, moved_batch, 1, evaluating, step=True)
        draws.append(draw)
    # Without the batch in reverse, whose outputs are in reverse too.
    reference.output_noise = output_noise(reference.observed, draws[-DRAWS:], eps / 2)
    for step in (0, 1):
        expected = reference.step(step)
        seen = draws
        if step:
            seen = [draw.second for draw in draws if draw.second is not None]
        add_noise_of_step(reference, expected, seen, shifts, eps / 2)
    reference.reason = why_too_noisy(reference)
    _note_small_steps(reference)


def add_noise_of_step(
    reference: Reference, expected: Observed, draws: list[Observed], shifts: list[dict[str, Tensor]], rounding: float
) -> None:
    """Add the noise of the next step to the reference.

    Args:
        reference: the reference.
        expected: the step, as the model takes it.
        draws: the same step of each draw.
        shifts: see `weight_noise`.
        rounding: the least noise, relative.
    """
    step = len(reference.noise)
    noise = Noise()
    noise.norm = max(rounding, norm_noise(expected, draws))
    noise.loss = max(rounding, loss_noise(expected, draws))
    noise.gradients, noise.unresolved = gradient_noise(expected, draws, rounding, reference.margin)
    reference.noise.append(noise)
    # What is not compared after the step follows from the gradients' noise.
    masks = {}
    tolerances = [reference.tolerance(index) for index in range(step + 1)]
    for name in expected.gradients:
        masks[name] = rounding_mask(reference, tolerances, name)
    noise.weights = weight_noise(expected, draws, shifts, masks, rounding)


def _note_small_steps(reference: Reference) -> None:
    """Add a note on weights that the optimizer's step moves by less than their tolerance."""
    observed = reference.observed
    hidden = []
    tolerance = reference.tolerance()
    for name in sorted(observed.parameters):
        before = observed.weights[name].local
        after = observed.after.get(name)
        size = size_of(before)
        if after is None or observed.gradients.get(name) is None or not size:
            continue
        moved = distance(after.local, before) / size
        if moved <= tolerance.weight(name):
            hidden.append(name)
    if hidden:
        names = _first_and_count(hidden)
        reference.notes.append(
            f"the step moves {names} by less than the tolerance: an optimizer that leaves them out is not seen"
        )


def why_too_noisy(reference: Reference) -> str:
    """Say which gradient is too inexact to see a wrong factor in it, and add a note on those that are only rounding.

    Returns:
        The reason why nothing can be compared; empty if it can.
    """
    noise = reference.noise[0]
    kind = dtype_name(reference.computes_in)
    if not reference.margin * noise.loss <= TOO_LOOSE:
        return (
            f"one rounding of the weights to {kind} moves the loss by {noise.loss:.1e}: a wrong factor would not be "
            "seen. Use a more exact type, or a smaller model"
        )
    largest = largest_gradient(reference.observed)
    small = []
    for name in sorted(noise.unresolved):
        gradient = reference.observed.before_clipping(name)
        assert gradient is not None
        own = size_of(gradient.local)
        # So small compared with the largest gradient that it may be nothing but the rounding of that.
        if own <= reference.margin * torch.finfo(reference.computes_in).eps * largest:
            small.append(name)
            continue
        moved = noise.gradients[name] * largest / own
        return (
            f"one rounding of the weights to {kind} moves the gradient of {name} by {moved:.1e} of its largest "
            f"element, and only {reference.margin} times that counts as a difference: a wrong factor would not be "
            "seen. Use a more exact type, or a smaller model"
        )
    if small:
        _note_only_rounding(reference, small)
    return ""


def _loss_floor(reference: Reference, parts: list[Observed]) -> float:
    """How far the mean loss over parts of the batch is from the loss of the batch, relative."""
    full = reference.observed.loss
    assert full is not None
    losses = [observed.loss.local for observed in parts if observed.loss is not None]
    scale = worst([reference.loss_scale, size_of(full.local)])
    return relative(torch.stack(losses).mean(), full.local.reshape(()), scale)


def _gradient_floors(reference: Reference, parts: list[Observed]) -> dict[str, float]:
    """By parameter, how far the mean gradient over parts of the batch is from that of the batch, relative."""
    full = reference.observed
    floors = {}
    tolerance = reference.tolerance()
    for name in full.gradients:
        gradient = full.before_clipping(name)
        if gradient is None:
            continue
        # A part that gives no gradient counts as zeros.
        total: Tensor | int = 0
        for observed in parts:
            of_part = observed.before_clipping(name)
            if of_part is not None:
                total = total + of_part.local
        mean = torch.as_tensor(total / len(parts)).expand_as(gradient.local)
        scale = tolerance.scale(name, gradient.local)
        floors[name] = relative(mean, gradient.local, scale)
    return floors


def _has_all_gradients(reference: Reference, observed: Observed) -> bool:
    """Whether a run on a part of the batch has the gradients of all of it, as far as rounding lets one see."""
    tolerance = reference.tolerance()
    floors = _gradient_floors(reference, [observed])
    return all(floor <= tolerance.gradient(name) for name, floor in floors.items())


def _why_alike(subject: Subject, batch: Any, n_parts: int) -> str:
    """Say why gradients that are the same for each part of the batch prove nothing.

    Empty if that does no harm: the samples are alike, and no axis splits them.
    """
    parts = []
    for index in range(n_parts):
        tensors = tensors_in(part_of(batch, index, n_parts))
        parts.append(tensors)
    first, *others = parts
    alike = all(all(map(same_elements, other, first)) for other in others)
    if not alike:
        return (
            f"the gradients on one device are the same for each of {n_parts} parts of the batch: they do not change "
            "with the input, and ranks that average nothing would agree"
        )
    if subject.n_parts > 1:
        return (
            f"the batch repeats itself: its {n_parts} parts are alike, and a program that averages nothing would "
            "agree. Give samples that differ"
        )
    return ""


def first_difference(one: Observed, other: Observed) -> str:
    """Where two steps of one program first differ: a module, the loss, or a gradient. Empty if they do not."""
    for name in innermost_first(one):
        calls = zip(one.outputs[name], other.outputs.get(name, []), strict=False)
        for call, other_call in calls:
            pairs = zip(call, other_call, strict=False)
            if any(_differ(output.local, other_output.local) for output, other_output in pairs):
                return name or "the model"
    if one.loss is not None and other.loss is not None and _differ(one.loss.local, other.loss.local):
        return "the loss"
    largest = largest_element(one.gradients.values())
    for name, gradient in one.gradients.items():
        theirs = other.gradients.get(name)
        if gradient is None or theirs is None:
            continue
        scale = scale_of(gradient.local, largest)
        if _differ(gradient.local, theirs.local, scale):
            return f"the gradient of {name}"
    return ""


def _differ(one: Tensor, other: Tensor, scale: float | None = None) -> bool:
    """Whether two tensors differ by more than another order of sums makes.

    That order changes with scattered additions on several threads, or with a compiler.
    """
    if scale is None:
        scale = finite_size_of(one)
    tolerance = 0.0
    if one.is_floating_point() or one.is_complex():
        eps = torch.finfo(one.dtype).eps
        roundings = ROUNDING
        if one.dtype.itemsize == 2:
            # So many roundings of 16 bits would hide what a model draws.
            roundings = ROUNDING_16_BITS
        tolerance = max(TOLERANCE / 100, roundings * eps)
    return not relative(other, one, scale) <= tolerance


def innermost_first(observed: Observed) -> list[str]:
    """The modules that were called, in the order in which their first calls end: inner ones before those around them.

    A wrong output is wrong first in the module that ends first. Every module around it, or after it, then returns
    something wrong too.
    """
    ended: list[str] = []
    # Modules whose call has begun and not ended, outermost first.
    running: list[str] = []
    # Outputs are listed in the order in which calls begin.
    for name in observed.outputs:
        while running and not _is_inside(name, running[-1]):
            ended.append(running.pop())
        running.append(name)
    return ended + running[::-1]


def _is_inside(name: str, module: str) -> bool:
    """Whether a module is inside another, by their names. The model's own name is empty."""
    return not module or name.startswith(f"{module}.")


def first_unlike(reference: Reference, parts: list[Observed]) -> str:
    """The first module whose output for the batch is not the concatenation of those for its parts. Empty if none is."""
    full = reference.observed
    for name in innermost_first(full):
        calls = [observed.outputs.get(name, []) for observed in (full, *parts)]
        # Calls of a module that is called several times cannot be matched.
        if any(len(calls_of_one) != 1 for calls_of_one in calls):
            continue
        outputs = [calls_of_one[0] for calls_of_one in calls]
        # One tuple for each tensor that the module returns: for the batch, then for each part.
        for output, *outputs_of_parts in zip(*outputs, strict=False):
            expected = output.local
            tensors = [tensor.local for tensor in outputs_of_parts]
            # Without samples along dim 0, or with other sizes for fewer samples, they cannot be joined.
            has_same_rows = all(tensor.shape[1:] == expected.shape[1:] for tensor in tensors)
            if not expected.ndim or not has_same_rows:
                continue
            joined = torch.cat(tensors)
            if joined.shape != expected.shape:
                continue
            tolerance = TOLERANCE
            if reference.noise:
                tolerance = reference.output_tolerance(name)
            if not relative(joined, expected, size_of(expected)) <= tolerance:
                return name or "the model"
    return ""
