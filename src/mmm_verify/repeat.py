"""The model on one process, compared with itself: how exactly it repeats itself limits every comparison."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

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
from mmm_verify.dtypes import dtype_name, widest
from mmm_verify.errors import ConfigError
from mmm_verify.noise import (
    DRAWS,
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
from mmm_verify.observe import Observed, innermost_first, named_parameters, without_dropout
from mmm_verify.plain import SEED, make_batch, make_model, observe_plain
from mmm_verify.reference import FLOOR, LOOSE, TOLERANCE, Reference, rounding_mask
from mmm_verify.subject import SAME_SAMPLES, Subject, check_parts, in_reverse, is_named, part_of, samples_of
from mmm_verify.torch_private import tensors_in, tree_map_only

# Two runs of one model may differ by so many roundings of 16 bits: kernels add up in an order that depends on where in
# memory a tensor lies.
ROUNDING_16_BITS = 8


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
    first = observe_plain(subject, state, batch, seed=1, step=True)
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


def _repeat(subject: Subject, reference: Reference, batch: Any) -> None:
    """Run the model once more, with other random numbers: what differs draws some, or is not deterministic.

    In the first case the model is compared in evaluation mode, if it draws none there.
    """
    state = reference.state
    again = observe_plain(subject, state, batch, seed=2)
    drawing = first_difference(reference.observed, again)
    if not drawing:
        return
    reference.evaluating = True
    reference.has_dropout = True
    reference.observed = observe_plain(subject, state, batch, seed=1, evaluating=True, step=True)
    again = observe_plain(subject, state, batch, seed=2, evaluating=True)
    still = first_difference(reference.observed, again)
    if not still:
        reference.notes.append(f"{drawing} draws random numbers in training: compared in evaluation mode")
        return
    # The same seed: what differs now is not drawn.
    again = observe_plain(subject, state, batch, seed=1, evaluating=True)
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
        observed = observe_plain(subject, reference.state, own, 1, reference.evaluating)
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
        reverse = observe_plain(subject, reference.state, in_reverse(batch), 1, reference.evaluating, dtypes=True)
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
    plain = observe_plain(subject, state, batch, 1, evaluating, dtypes=True)
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
        reverse = observe_plain(subject, state, in_reverse(batch), 1, evaluating, step=True)
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
        draw = observe_plain(subject, moved, moved_batch, 1, evaluating, step=True)
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
