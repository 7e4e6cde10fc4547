"""The model on one process: what it computes, and how far that can be compared at all."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmm_verify.difference import NOTHING, ROUNDING, finite_size_of, relative, same_elements, scale_of, size_of, worst
from mmm_verify.errors import ConfigError, is_for_user
from mmm_verify.memory import free_memory
from mmm_verify.observe import Observed, named_parameters, observe, without_dropout
from mmm_verify.subject import SAME_SAMPLES, Subject, check_parts, in_reverse, part_of, samples_of
from mmm_verify.torch_private import map_tensors, tree_leaves, tree_map_only

SEED = 0
NOISE = 0.02  # added to initial weights, of their own spread: no zeros that hide a gradient, no rows alike
TOLERANCE = 1e-9  # relative, of float64
LOOSE = 1e-4  # a noise floor above it decides nothing
FLOOR = 32  # how far above the noise floor a difference has to be
COPIES = 6  # of the parameters on each process: weights, gradients, and what is kept of both, of two steps


@dataclass
class Reference:
    """What one process computes.

    Attributes:
        state: weights that every rank begins with, by name. observed: the step on the full batch.
        floor: by parameter, how far its gradient moves by splitting the batch; loss_floor: likewise.
        loss_scale: the largest loss of the batch and its parts, since that of the batch may be 0.
        has_dropout: whether dropout was turned off. evaluating: whether the model had to be in evaluation mode.
        split: how near the batch in parts comes to the batch, in words; empty where it was not split.
        types: as of `Observed`.
        reason: why nothing can be compared; empty if it can.
        notes: what a reader of the verdict has to know.
    """

    state: dict[str, Tensor]
    observed: Observed
    samples: int
    floor: dict[str, float] = field(default_factory=dict)
    loss_floor: float = 0.0
    loss_scale: float = 0.0
    has_dropout: bool = False
    evaluating: bool = False
    split: str = ""
    types: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    reason: str = ""
    notes: list[str] = field(default_factory=list)

    def gradient(self, name: str) -> Tensor | None:
        gradient = self.observed.gradients.get(name)
        return None if gradient is None else gradient.local

    def tolerance(self, name: str) -> float:
        """How far a parameter's gradient, or value after a step, may be off, relative to the largest element."""
        return max(TOLERANCE, FLOOR * self.floor.get(name, worst([0.0, *self.floor.values()])))

    @property
    def largest_gradient(self) -> float:
        sizes = [size_of(g.local) for g in self.observed.gradients.values() if g is not None]
        return worst(sizes) if sizes else 0.0


def seed_all(seed: int) -> None:
    """Seed the generators that a program draws from: PyTorch's, Python's and, where it is imported, NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def to_float64(tensor: Tensor) -> Tensor:
    """Floats in float64, complex numbers in complex128; integers and bools as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def make_model(subject: Subject, state: Mapping[str, Tensor] | None, dropout: bool, evaluating: bool) -> nn.Module:
    """The model in float64, with the weights of `state`, or its own with a little noise.

    Raises:
        ConfigError: `model_fn` raises, or gives no module that can be computed with; one that is too large.
    """
    seed_all(SEED)
    try:
        model = subject.model_fn()
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"the model's function raises {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model's function returns {type(model).__name__}, and has to return an nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu" or is_lazy(tensor):
            raise ConfigError(f"{name} is on {tensor.device.type} or has no size yet: the model has to have its values")
    if state is None:
        _check_memory(model, len(subject.places))
    map_tensors(model, to_float64)
    model.zero_grad()  # of a function that gives one and the same model each time
    _set_mode(model, evaluating)
    if not dropout:
        without_dropout(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(SEED)
        for name, parameter in dict(named_parameters(model)).items():
            if state is not None:
                parameter.copy_(state[name])
            elif parameter.is_floating_point() or parameter.is_complex():
                spread = parameter.std().item() if parameter.numel() > 1 else 0.0
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise * NOISE * (spread or 1.0))
        for name, buffer in model.named_buffers():
            if state is not None and name in state:
                buffer.copy_(state[name])
    return model


def _set_mode(model: nn.Module, evaluating: bool) -> None:
    """Evaluation mode, or the mode that the model's function has left each module in: a batch norm may be frozen."""
    if evaluating:
        model.eval()
    elif model.training:
        frozen = [module for module in model.modules() if not module.training]
        model.train()  # a class may freeze modules in its own
        for module in frozen:
            module.training = False


def _check_memory(model: nn.Module, ranks: int) -> None:
    """Raises ConfigError where the ranks' models, which are full until they are sharded, cannot all be in memory."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    needed, free = 8 * COPIES * ranks * elements, free_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"{elements:,} parameters in float64 take about {needed / 2**30:,.1f} GiB on {ranks} "
            f"rank{'s' * (ranks > 1)}, each of which begins with the full model, and {free / 2**30:,.1f} GiB are free "
            f"here: verify it with fewer layers, or narrower"
        )


def make_batch(subject: Subject) -> Any:
    """The global batch, its floats in float64.

    Raises:
        ConfigError: `batch_fn` raises, or gives nothing with samples.
    """
    seed_all(SEED)
    try:
        batch = subject.batch_fn()
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"the batch's function raises {type(error).__name__}: {error}") from error
    samples_of(batch)
    return tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)


def compute_reference(subject: Subject) -> Reference:
    """The model against itself: as it is, once more, and with its batch split.

    Raises:
        ConfigError: the model, the batch or the step cannot be used. LayoutError: the batch does not divide.
    """
    batch = make_batch(subject)
    check_parts(subject, batch)
    model = make_model(subject, None, dropout=True, evaluating=False)
    has_dropout = without_dropout(model) and model.training
    state = {name: p.detach().clone() for name, p in dict(named_parameters(model)).items()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    first = _observed(subject, state, batch, seed=1, step=True)
    reference = Reference(state, first, samples_of(batch), has_dropout=has_dropout)
    if not model.training:
        reference.notes.append(
            "the model's function returns it in evaluation mode, and so it is compared: what dropout and the "
            "statistics of a batch do in training is not seen"
        )
    if first.loss is None:
        raise ConfigError("the step's function returns None on one device: it has to return the loss")
    if first.loss.local.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(first.loss.local.shape)}: it has to be one number, the mean")
    if not any(gradient is not None for gradient in first.gradients.values()):
        raise ConfigError("no parameter has got a gradient on one device: does the loss depend on the model?")
    if not torch.isfinite(first.loss.local).all():
        reference.reason = f"the loss on one device is {first.loss.local.item()}"
        return reference
    for name, gradient in first.gradients.items():
        if gradient is not None and not torch.isfinite(gradient.local).all():
            reference.reason = f"the gradient of {name} on one device is not finite"
            return reference
    reference.reason = _why_dead(first)
    if reference.reason:
        return reference
    _say_what_is_not_seen(subject, reference)
    _twice(subject, reference, batch)
    if not reference.reason:
        _split(subject, reference, batch)
    if not reference.reason:
        _rounding(subject, reference, batch)
    return reference


def _why_dead(observed: Observed) -> str:
    """Why the loss does not depend on the weights, so that any other program would agree. Empty where it does."""
    assert observed.loss is not None
    loss = size_of(observed.loss.local)
    # A gradient times its weight: how far the loss moves as the weight becomes twice what it is.
    moves = [
        size_of(gradient.local) * size_of(observed.weights[name].local)
        for name, gradient in observed.gradients.items()
        if gradient is not None
    ]
    if worst(moves) > NOTHING * loss:
        return ""
    return (
        f"every gradient on one device is 0, and the loss is {loss:.6g} whatever the weights are: a program that does "
        "nothing would agree. Are all labels ignored, or is something multiplied by 0?"
    )


def _say_what_is_not_seen(subject: Subject, reference: Reference) -> None:
    """Notes on parameters that this step gives no gradient, and on axes that may be meant to split the batch."""
    lacking = [name for name, gradient in reference.observed.gradients.items() if gradient is None]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        reference.notes.append(
            f"{lacking[0]}{more} get no gradient on one device, from this batch and step: none is compared"
        )
    dead = [name for name, gradient in reference.observed.gradients.items() if gradient and not size_of(gradient.local)]
    if dead:
        more = f" and of {len(dead) - 1} more" if len(dead) > 1 else ""
        reference.notes.append(
            f"the gradient of {dead[0]}{more} is exactly 0 on one device, from this batch and step: that the ranks "
            "agree says nothing of them"
        )
    for axis, size in subject.axes.items():
        if size > 1 and axis not in subject.batch_axes and not set(axis.lower().split("_")) & set(SAME_SAMPLES):
            reference.notes.append(
                f"all ranks of {axis} have the same samples. If they are for different ones: --batch_axes {axis}"
            )


def _observed(
    subject: Subject,
    state: Mapping[str, Tensor],
    batch: Any,
    seed: int,
    evaluating: bool = False,
    step: bool = False,
    types: bool = False,
) -> Observed:
    model = make_model(subject, state, dropout=False, evaluating=evaluating)
    seed_all(seed)
    try:
        return observe(subject, model, batch, None, step=step, types=types)
    except Exception as error:  # whatever the user's code raises
        if is_for_user(error):
            raise
        raise ConfigError(f"a step on one device raises {failure_of(error)}") from error


def failure_of(error: Exception) -> str:
    """An error of the user's step in words, with what to change where that is known."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("dtype", "Double", "double")):
        words += ". All is computed in float64: a .float() in the code gives float32, and .to(x.dtype) what x is"
    return words


def _twice(subject: Subject, reference: Reference, batch: Any) -> None:
    """Once more with other random numbers: what differs draws them, or is not deterministic."""
    again = _observed(subject, reference.state, batch, seed=2)
    module = first_difference(reference.observed, again)
    if module is None:
        return
    reference.evaluating = reference.has_dropout = True
    reference.observed = _observed(subject, reference.state, batch, seed=1, evaluating=True, step=True)
    again = _observed(subject, reference.state, batch, seed=2, evaluating=True)
    still = first_difference(reference.observed, again)
    if still is None:
        reference.notes.append(f"{module} draws random numbers in training: compared in evaluation mode")
        return
    again = _observed(subject, reference.state, batch, seed=1, evaluating=True)
    if first_difference(reference.observed, again) is None:
        reference.reason = (
            f"random numbers are drawn in evaluation mode too, first seen in {still}: draw them in the batch's "
            "function, so that one device and the ranks have the same"
        )
    else:
        reference.reason = f"not deterministic: {still} gives something else the second time, on one device"


def _split(subject: Subject, reference: Reference, batch: Any) -> None:
    """The batch in parts: the mean of the parts' gradients is that of the batch, to rounding, if no sample sees
    another."""
    parts = subject.parts if subject.parts > 1 and subject.local_batch_fn is None else 2
    if reference.samples % parts:
        parts = reference.samples if reference.samples <= 8 else 1
    if parts == 1:
        return
    pieces = [
        _observed(subject, reference.state, part_of(batch, part, parts), 1, reference.evaluating)
        for part in range(parts)
    ]
    whole = reference.observed
    if all(_same_gradients(whole, piece) for piece in pieces):
        reference.reason = _why_alike(subject, batch, parts)
        if reference.reason:
            return
    losses = [seen.loss.local for seen in (whole, *pieces) if seen.loss is not None]
    reference.loss_scale = worst([size_of(loss) for loss in losses])
    reference.loss_floor, reference.floor = _floors(reference, pieces)
    floor = worst([reference.loss_floor, *reference.floor.values()])
    reference.split = f"; with the batch split to {floor:.0e}"
    if floor <= TOLERANCE:
        return
    unlike = first_unlike(whole, pieces)
    if not floor <= LOOSE:  # not rounding: samples see each other, or are counted
        what = (
            f"{unlike} notices the other samples of a batch"
            if unlike
            else ("the loss of a batch is not the mean of its parts' losses, such as a mean over a count that differs")
        )
        if not unlike and reference.loss_floor <= LOOSE:
            what = "the gradient of a batch is not the mean of its parts' gradients, as where the step clips it"
        reference.notes.append(f"{what}: a rank that has a part of them computes something else by itself")
        reference.floor.clear()
        reference.loss_floor = 0.0
    else:
        # From the loss back: rounding in one module moves the gradients of all before it.
        moved = [name for name, off in reference.floor.items() if off > TOLERANCE]
        where = f", first seen in the gradient of {moved[-1]}" if moved else ""
        reference.notes.append(
            f"the model itself is right to {floor:.0e} alone (the batch split in {parts}): something in it computes in "
            f"less than float64{where}. Differences below {FLOOR} times that are not seen"
        )


def _rounding(subject: Subject, reference: Reference, batch: Any) -> None:
    """Raise the floors to what rounding does of functions that compute in less than float64.

    Where a batch in parts is no measure, since its samples see each other or are counted, the batch in another order
    is: all that it changes is the order of sums."""
    try:
        other = _observed(subject, reference.state, in_reverse(batch), 1, reference.evaluating, types=True)
    except ConfigError:  # such as a graph, whose edges name its nodes by their places
        return
    reference.types = other.types
    if not reference.floor:
        loss_floor, floors = _floors(reference, [other])
        if worst([loss_floor, *floors.values()]) <= LOOSE:
            reference.loss_floor = loss_floor
            reference.floor = floors
    assert reference.observed.loss is not None
    if reference.observed.loss.local.dtype in (torch.bfloat16, torch.float16):  # it may be equal by chance
        eps = torch.finfo(reference.observed.loss.local.dtype).eps
        reference.loss_floor = max(reference.loss_floor, eps)
    functions = sorted(function for function, dtype in other.types if dtype == torch.float32)
    if not functions:
        return
    # Another order of its sums may change nothing, and another cut of them does.
    least = torch.finfo(torch.float32).eps / 2
    reference.loss_floor = max(reference.loss_floor, least)
    for name in reference.observed.gradients:
        reference.floor[name] = max(reference.floor.get(name, 0.0), least)
    reference.notes.append(
        f"something in it computes in float32 on one device too, such as {functions[-1]}: differences below "
        f"{FLOOR * least:.0e} are not seen"
    )


def _floors(reference: Reference, pieces: list[Observed]) -> tuple[float, dict[str, float]]:
    """How far the mean over pieces of the batch is from the batch: of the loss, and of the gradients by name."""
    whole = reference.observed
    assert whole.loss is not None
    losses = [piece.loss.local for piece in pieces if piece.loss is not None]
    scale = worst([reference.loss_scale, size_of(whole.loss.local)])
    loss_floor = relative(torch.stack(losses).mean(), whole.loss.local, scale)
    floors = {}
    for name in whole.gradients:
        gradient = whole.before_clipping(name)
        if gradient is None:
            continue
        split = [piece.before_clipping(name) for piece in pieces]
        mean = sum(g.local for g in split if g is not None) / len(pieces)
        scale = scale_of(gradient.local, reference.largest_gradient)
        floors[name] = relative(torch.as_tensor(mean), gradient.local, scale)
    return loss_floor, floors


def _same_gradients(one: Observed, other: Observed) -> bool:
    for name in one.gradients:
        gradient = one.before_clipping(name)
        theirs = other.before_clipping(name)
        if gradient is None or theirs is None:
            if gradient is not theirs:
                return False
        elif not relative(theirs.local, gradient.local, size_of(gradient.local)) <= TOLERANCE:
            return False
    return True


def _why_alike(subject: Subject, batch: Any, parts: int) -> str:
    """Why gradients that are the same for each part of the batch decide nothing. Empty where it does: the samples are
    alike, and no axis splits them."""
    pieces = [
        [leaf for leaf in tree_leaves(part_of(batch, part, parts)) if isinstance(leaf, Tensor)] for part in range(parts)
    ]
    alike = all(
        same_elements(leaf, first) for piece in pieces[1:] for leaf, first in zip(piece, pieces[0], strict=True)
    )
    if not alike:
        return (
            f"the gradients on one device are the same for each of {parts} parts of the batch: they do not change with "
            "the input, and ranks that average nothing would agree"
        )
    if subject.parts > 1:
        return (
            f"the batch repeats itself: its {parts} parts are alike, and a program that averages nothing would agree. "
            "Give samples that differ"
        )
    return ""


def first_difference(one: Observed, other: Observed) -> str | None:
    """The first module, or what else, in which two steps of one program differ; None if nothing does."""
    for name in innermost_first(one):
        for call, again in zip(one.outputs[name], other.outputs.get(name, []), strict=False):
            if any(_differ(a.local, b.local) for a, b in zip(call, again, strict=False)):
                return name or "the model"
    if one.loss is not None and other.loss is not None and _differ(one.loss.local, other.loss.local):
        return "the loss"
    largest = worst([0.0, *(size_of(g.local) for g in one.gradients.values() if g is not None)])
    for name, gradient in one.gradients.items():
        again_gradient = other.gradients.get(name)
        both = gradient is not None and again_gradient is not None
        if both and _differ(gradient.local, again_gradient.local, scale_of(gradient.local, largest)):  # type: ignore[union-attr]
            return f"the gradient of {name}"
    return None


def _differ(one: Tensor, other: Tensor, scale: float | None = None) -> bool:
    """By more than another order of sums makes, as of scattered additions on several threads, or a compiler's."""
    if one.shape != other.shape:
        return True
    scale = finite_size_of(one) if scale is None else scale
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
    return not relative(other, one, scale) <= (0.0 if not eps else max(TOLERANCE / 100, ROUNDING * eps))


def innermost_first(observed: Observed) -> list[str]:
    """The modules that were called, in the order of their first calls; those with others inside after those."""
    names = list(observed.outputs)
    parents = {"" if "." not in name else name.rpartition(".")[0] for name in names if name}
    outer = {
        parent for parent in names if parent in parents or any(n.startswith(f"{parent}.") for n in names if parent)
    }
    return [name for name in names if name not in outer] + [name for name in reversed(names) if name in outer]


def first_unlike(whole: Observed, pieces: list[Observed]) -> str:
    """The first module whose output for the batch is not those for its parts, one after the other; empty if none is."""
    for name in innermost_first(whole):
        calls = [whole.outputs[name], *(piece.outputs.get(name, []) for piece in pieces)]
        if any(len(of_one) != 1 for of_one in calls):
            continue
        for output, *split in zip(*(of_one[0] for of_one in calls), strict=False):
            full, parts = output.local, [part.local for part in split]
            if not full.ndim or any(part.shape[1:] != full.shape[1:] for part in parts):
                continue
            joined = torch.cat(parts)
            if joined.shape == full.shape and not relative(joined, full, size_of(full)) <= TOLERANCE:
                return name or "the model"
    return ""
