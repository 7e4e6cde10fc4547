"""Compares what the ranks saw with the model on one process, in the order in which a mistake would show.

Each stage is a function: it reads what was `Seen`, which nothing changes, and returns a `Stage` with what it found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of, finite_size_of, fits, relative, same_elements, size_of, worst
from mmm_verify.dtypes import dtype_name, widest
from mmm_verify.locate import first_wrong_module, rows_of_batch
from mmm_verify.loss import Losses, LossReading
from mmm_verify.norm import NEAR, explain_norm
from mmm_verify.observe import LocalTensor, innermost_first
from mmm_verify.reference import ALIKE, rounding_mask
from mmm_verify.relations import KEPT, NEVER, Pair, describe_relation, reduced, times
from mmm_verify.seen import FINER, ByRank, Seen, Stage, begin
from mmm_verify.subject import plain_sgd
from mmm_verify.torch_private import tensors_in
from mmm_verify.verdict import NOT_COMPARABLE, NOT_SAME, ROUNDED, SAME, Finding, Verdict

NORM = "the norm that the step clips by"
NOT_UPDATED = "is not updated: it is what it was before the step"
LEFT_BY_STEP = "same: {}, as the optimizer's step leaves them"
BY_WEIGHTS = "{}, of which each rank has its own: the weights that the optimizer's step leaves decide"
MADE_ONE = (
    "is one weight on all ranks, which step by gradients of their own, but not that of one device: the step divides by "
    "another number, or averages what an optimizer other than SGD has made of each rank's own gradient"
)
CLIPPED_FIRST = (
    "was clipped on each rank, by the norm of its own gradients, before the ranks' gradients were averaged: average "
    "them first"
)
# A step has to move a weight by so many tolerances for the weight to show which gradient it used.
RESOLVED = 4
# A GPU and a CPU compute logarithm and cosine of the same random integers by other functions. Each may round by some of
# these: the distance from 1 to the next number of a type.
DRAWN_ALIKE = 8

# Compares one thing, after the stages that are done.
Compare = Callable[[Seen, Sequence[Stage]], Stage]


def evaluate(seen: Seen, stages: Sequence[Compare] | None = None) -> Verdict:
    """Compare stage by stage, up to the first that is not the same: each builds on the ones before.

    Args:
        stages: other ones than `STAGES`.
    """
    done: list[Stage] = []
    if not seen.reason:
        for compare in stages or STAGES:
            stage = compare(seen, done)
            done.append(stage)
            if stage.findings or stage.reason:
                break
    return _verdict_of(seen, done)


def _verdict_of(seen: Seen, done: Sequence[Stage]) -> Verdict:
    """The verdict of all that was compared."""
    reason = seen.reason
    first = ""
    findings: list[Finding] = []
    rounded: list[Finding] = []
    notes = list(seen.notes)
    compared = {}
    errors = {}
    for stage in done:
        findings += stage.findings
        rounded += stage.rounded
        reason = reason or stage.reason
        first = first or stage.first
        notes += stage.notes
        if stage.compared:
            compared[stage.name] = stage.compared
        if stage.error is not None:
            errors[stage.name] = stage.error
    result = SAME
    if findings:
        result = NOT_SAME
        reason = ""
    elif reason:
        result = NOT_COMPARABLE
    elif rounded:
        result = ROUNDED
        findings = rounded
        if not seen.subject.exact:
            result = NOT_COMPARABLE
            reason = (
                "the parallel program rounds to 16 bits what the model computes in "
                f"{dtype_name(seen.subject.dtype)}, and nothing is off by more than that may come to. Let it compute "
                "as the model does, or compare both in 16 bits: --dtype bf16"
            )
    if not first and findings:
        first = findings[0].name
    return Verdict(
        result,
        seen.subject.layout,
        len(seen.ranks),
        compared,
        tuple(findings),
        first=first,
        reason=reason,
        notes=tuple(notes),
        dtype=dtype_name(seen.subject.dtype),
        tolerances=seen.reference.tolerances(),
        errors=errors,
    )


def _is_rounded(seen: Seen, stage: Stage, value: Tensor, expected: Tensor, error: float) -> bool:
    """Whether a tensor is off by rounding, in a program that rounds where the model does not."""
    if not error <= seen.rounding.at_most or not expected.is_floating_point():
        return False
    if stage.rounds:
        return True
    # A type that holds the right tensor exactly too proves nothing.
    return any(fits(value, dtype) and not fits(expected, dtype) for dtype in seen.rounding.dtypes)


def _relation(
    seen: Seen,
    stage: Stage,
    kind: str,
    name: str,
    rank: int,
    tensors: ByRank,
    expected: Tensor,
    full: Tensor,
    scale: float,
) -> str:
    """Say what a rank's wrong tensor is instead.

    Args:
        kind: the field of `Observed` that has it: weights, gradients or after.
        name: name of the parameter or buffer on one device.
        rank: the rank that has the wrong tensor.
        tensors: by rank, its tensor of this name.
        expected: what this rank should have.
        full: the full tensor, on one device.
        scale: what differences are divided by.
    """

    def others(other: int) -> Pair:
        return seen.own(name, other, tensors), seen.own_part(name, other, tensors, full)

    value = seen.own(name, rank, tensors)
    by_itself = None
    if value is not None and value.shape == expected.shape:
        error = relative(value, expected, scale)
        # A buffer that the parallel program has computed anew, after the model's had been made in float32.
        may_be_finer = seen.subject.exact and value.is_floating_point() and kind != "gradients"
        if may_be_finer and same_elements(value.float().to(expected.dtype), expected):
            return FINER
        if _is_rounded(seen, stage, value, expected, error):
            return seen.rounding.relation
        alone = seen.ranks[rank].alone
        # The plain model has taken the first step only.
        if alone is not None and seen.step == 0:
            own = getattr(alone, kind).get(name)
            if own is not None:
                by_itself = seen.own_part(name, rank, tensors, own.local)
    # How near two tensors have to be to count as the same when a difference is explained.
    alike = ALIKE
    # Weights before the first step are the same bit for bit.
    if not seen.subject.exact and kind == "after":
        alike = seen.tolerance.weight(name)
    elif not seen.subject.exact and kind == "gradients":
        alike = seen.tolerance.gradient(name)
    return describe_relation(value, expected, scale, rank, others, by_itself, seen.subject, alike)


def weights(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Compare parameters and buffers after the model was parallelized: equal, bit for bit, or as drawn on a GPU."""
    stage = begin("weights", seen, done)
    known = seen.reference.observed
    exactness = "bit for bit"
    if seen.subject.draws_elsewhere:
        exactness = "but for the last digit of what a GPU draws"
    count = 0
    for name, full in known.weights.items():
        tensors = seen.by_rank("weights", name)
        if any(tensors):
            count += 1
        elif name in known.parameters:
            stage.find(seen, name, None, "is on no rank of the parallel program")
        else:
            stage.notes.append(f"the buffer {name} is on no rank of the parallel program: it is not compared")
        for rank, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if name not in seen.places[rank]:
                _find_no_part(seen, stage, name, rank, tensor, full.local)
                continue
            expected = seen.places[rank][name].of(full.local)
            own = seen.places[rank][name].unpadded(tensor.local)
            if own.shape == expected.shape and same_elements(own.to(expected.dtype), expected):
                continue
            scale = size_of(full.local)
            if seen.subject.draws_elsewhere and _drawn_alike(own, expected, scale):
                continue
            relation = _relation(seen, stage, "weights", name, rank, tensors, expected, full.local, scale)
            stage.find(seen, name, rank, relation, relative(own, expected, scale))
        if seen.is_padded(name):
            _padding(seen, stage, name, full.local)
    _ties(seen, stage)
    if stage.clean:
        ranks = "1 rank" if len(seen.ranks) == 1 else f"{len(seen.ranks)} ranks"
        stage.compared = f"same: {count} tensors on {ranks}, {exactness}"
    return stage


def _drawn_alike(own: Tensor, expected: Tensor, scale: float) -> bool:
    """Whether a tensor differs from another as the same random numbers do on another type of device."""
    if not expected.is_floating_point():
        return False
    return relative(own, expected, scale) <= DRAWN_ALIKE * torch.finfo(expected.dtype).eps


def _find_no_part(seen: Seen, stage: Stage, name: str, rank: int, tensor: LocalTensor, full: Tensor) -> None:
    """Report a tensor that is not a part of the weight.

    It is wrong, unless it has the model's own elements in another arrangement: that cannot be compared.
    """
    mismatch = f"{tuple(tensor.local.shape)} is not a part of the weight of {tuple(full.shape)}"
    elements = []
    for weight in seen.reference.observed.weights.values():
        if weight.local.dtype == full.dtype:
            elements.append(weight.local.flatten())
    own = tensor.local.to(full.dtype)
    is_longer = False
    if own.ndim == full.ndim:
        lengths = zip(own.shape, full.shape, strict=True)
        is_longer = any(own_length > length for own_length, length in lengths)
    if is_longer or seen.is_padded(name) or torch.isin(own, torch.cat(elements)).all():
        stage.reason = (
            f"{name} on rank {rank}: {mismatch}: padding, or the model's elements in another arrangement; the "
            "place of an adapter can tell which"
        )
    else:
        stage.find(seen, name, rank, f"{mismatch}: other elements, or shape")


def _padding(seen: Seen, stage: Stage, name: str, full: Tensor) -> None:
    """Check that the ranks that share a padded weight have all of its elements, and add a note on the padding."""
    for rank, places in enumerate(seen.places):
        if name not in places or not any(places[name].padding):
            continue
        # The ranks of one of the axes share it. It is not known which axis.
        n_missing = min(_n_missing(seen, seen.subject.group(rank, axis), name, full) for axis in seen.subject.axes)
        if n_missing:
            stage.find(seen, name, rank, f"{n_missing} of its elements are not on the ranks that share it")
            return
    stage.notes.append(f"{name} of {tuple(full.shape)} is padded on the ranks: padding is not compared")


def _n_missing(seen: Seen, ranks: Sequence[int], name: str, full: Tensor) -> int:
    """The number of a weight's elements that none of some ranks has."""
    # Each element's position in memory, in the shape of the weight: it tells elements of equal value apart.
    element_index = torch.arange(full.numel()).view(full.shape)
    present = []
    for rank in ranks:
        place = seen.places[rank].get(name)
        if place is not None:
            present.append(place.of(element_index).flatten())
    return full.numel() - len(torch.cat(present).unique())


def _ties(seen: Seen, stage: Stage) -> None:
    """Check that a weight that several modules share is one parameter on each rank that has two of them."""
    for group in seen.reference.observed.ties:
        first, *others = group
        for rank, names in enumerate(seen.names):
            local = {names[name] for name in group if name in names}
            parallel = seen.ranks[rank].parallel
            # Two stages of a pipeline have a copy each, as two ranks would: their gradients tell.
            if len(local) < 2 or len({parallel.parameters[name] for name in local}) > 1:
                continue
            if not any(local.issubset(tied) for tied in parallel.ties):
                stage.find(seen, first, rank, f"is no longer one parameter with {', '.join(others)}")


def samples(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Check that each sample is in one part of the batch, and that the ranks of one part have the same samples."""
    stage = begin("batch", seen, done)
    n_parts = seen.subject.n_parts
    if seen.subject.local_batch_fn is None:
        where = f"in {n_parts} equal parts" if n_parts > 1 else "on every rank"
        stage.compared = f"{seen.reference.samples} samples {where}"
        return stage
    tensors = tensors_in(seen.batch)
    rows_of_part: dict[int, list[int]] = {}
    for rank, observed in enumerate(seen.ranks):
        rows = rows_of_batch(observed.batch, tensors)
        if rows is None:
            stage.compared = "not compared: a rank's tensors are not samples of the batch, but parts of them"
            return stage
        if rows_of_part.setdefault(seen.subject.part_index(rank), rows) != rows:
            stage.find(seen, "the batch", rank, "has other samples than the ranks of the same part")
    # Sample → in how many parts it is.
    counts: Counter[int] = Counter()
    for rows in rows_of_part.values():
        counts.update(rows)
    # The counts in the batch itself: samples that are alike have one index, and count several times.
    expected = Counter(rows_of_batch(tensors, tensors))
    missing = expected - counts
    if missing:
        more = missing.total() - 1
        stage.find(seen, "the batch", None, f"sample {min(missing)} and {more} more are on no rank")
    elif counts - expected:
        stage.find(seen, "the batch", None, "samples are with several ranks that split the batch")
    else:
        stage.compared = f"same: {counts.total()} samples, each in one of {len(rows_of_part)} parts"
    return stage


def loss(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Compare the loss: each rank has that of the batch, or the ranks' mean or sum over some axes is it."""
    stage = begin("loss", seen, done)
    reading = _read_loss(seen, stage)
    stage.axes = reading.axes
    stage.error = reading.error
    if reading.wrong:
        if reading.wrong != seen.rounding.relation:
            stage.first = first_wrong_module(seen)
        stage.find(seen, "the loss", None, reading.wrong, reading.error)
        return stage
    assert seen.expected.loss is not None
    same = f"same: {seen.expected.loss.local.item():.9g}"
    if reading.reading:
        same += f", {reading.reading}"
    stage.compared = f"{same}, within {reading.error:.0e}"
    return stage


def _read_loss(seen: Seen, stage: Stage) -> LossReading:
    """Find out how the ranks' losses make that of the batch, and whether a wrong one is only rounded."""
    losses = [observed.loss for observed in seen.observed]
    assert seen.expected.loss is not None
    expected = seen.expected.loss.local
    reading = Losses(seen).read(losses, expected, seen.tolerance.loss)
    if not reading.wrong:
        return reading
    values = [value.local.flatten().double() for value in losses if value is not None]
    # (losses of all ranks,)
    if values and _is_rounded(seen, stage, torch.cat(values), expected.double(), reading.error):
        return replace(reading, wrong=seen.rounding.relation)
    # The words have the losses, and how they are to each other. Only what may be rounding has a distance.
    if not reading.error <= seen.rounding.at_most:
        return replace(reading, error=math.inf)
    return reading


def gradients(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Compare every gradient on each rank with the part of the full one that belongs to its weight."""
    stage = begin("gradients", seen, done)
    _compare_gradients(seen, stage)
    expected = seen.expected.gradients
    wrong = stage.wrong(_names_backward(seen))
    if wrong:
        # Gradients that are 0 cannot be wrong by a factor: "every gradient" is every other one.
        nonzero = set()
        for name, gradient in expected.items():
            if gradient is not None and not seen.tolerance.is_nothing(name, gradient.local):
                nonzero.add(name)
        stage.first = first_wrong_module(seen)
        if not stage.first and nonzero <= set(wrong):
            stage.first = "every gradient"
        elif not stage.first:
            stage.first = f"gradient of {wrong[0]} (first in backward order)"
        _explain_by_norm(seen, stage, nonzero)
    elif stage.clean:
        count = sum(gradient is not None for gradient in expected.values())
        same = stage.judged.format(count)
        if seen.expected.norms:
            same += ", before and after clipping"
        stage.compared = f"{same}, within {stage.error:.0e}"
    return stage


def _names_backward(seen: Seen) -> list[str]:
    """Parameters in the order of backward, from the loss: a wrong gradient makes later ones wrong."""
    position: dict[str, int] = {}
    for index, module in enumerate(innermost_first(seen.reference.observed)):
        position[module] = index

    def position_in_forward(name: str) -> int:
        module = name.rpartition(".")[0]
        # Parameters of modules that are not called come last.
        return position.get(module, -1)

    # Parameters of one module keep their order: a reversed sort is stable too.
    return sorted(seen.expected.gradients, key=position_in_forward, reverse=True)


def _compare_gradients(seen: Seen, stage: Stage) -> None:
    """Compare gradients before the step clips them, its norms, and gradients after it, and set the stage's error."""
    errors = [0.0]
    expected = seen.expected.gradients
    # A program may also clip by other means than PyTorch's functions, where nothing was recorded before.
    clips = all(observed.norms for observed in (seen.expected, *seen.observed))
    names = _names_backward(seen)
    for name in names:
        tensors = seen.by_rank("gradients", name)
        full = expected[name]
        if clips:
            tensors = []
            for observed, local_names in zip(seen.observed, seen.names, strict=True):
                tensors.append(observed.before_clipping(local_names.get(name, "")))
            full = seen.expected.before_clipping(name)
        for rank in range(len(seen.ranks)):
            errors.append(_gradient(seen, stage, name, rank, tensors, full))
    if clips and not stage.findings:
        # Right gradients may still be clipped wrongly: by a wrong norm, or by another function.
        _compare_norms(seen, stage)
        if not stage.findings:
            for name in names:
                tensors = seen.by_rank("gradients", name)
                for rank in range(len(seen.ranks)):
                    _gradient(seen, stage, name, rank, tensors, expected[name])
    stage.error = worst(errors)


def _compare_norms(seen: Seen, stage: Stage) -> None:
    """Compare the norms by which each rank clips."""
    tolerance = seen.tolerance.norm
    for index, norm in enumerate(seen.expected.norms):
        expected = norm.local
        # A rank may have clipped less often.
        norms: ByRank = []
        for observed in seen.observed:
            norms.append(observed.norms[index] if index < len(observed.norms) else None)
        for rank in range(len(seen.ranks)):
            value = reduced(norms, rank)
            if value is None or value.numel() != 1:
                continue
            value = value.reshape(expected.shape)
            error = relative(value, expected, size_of(expected))
            if error <= tolerance:
                continue
            relation = seen.rounding.relation
            if not _is_rounded(seen, stage, value, expected, error):
                relation = _explained_norm(seen, value.item() / expected.item(), rank)
            stage.find(seen, NORM, rank, relation, error)


def _explained_norm(seen: Seen, factor: float, rank: int) -> str:
    """Say how a norm is wrong: by which factor and, if something explains it, why."""
    # A tied weight counts once, under the first of its names.
    others: set[str] = set()
    for group in seen.reference.observed.ties:
        others.update(group[1:])
    full = {}
    for name in seen.expected.gradients:
        gradient = seen.expected.before_clipping(name)
        if gradient is not None and name not in others:
            full[name] = gradient.local
    alike = 0.0
    if not seen.subject.exact:
        alike = seen.tolerance.norm
    relation = f"{times(factor, seen.subject, alike)} what it should be"
    # The square of a norm is off by twice as much as the norm.
    why = explain_norm(factor, full, seen.places, rank, seen.subject, max(NEAR, 2 * alike))
    if why:
        return f"{relation}: {why}"
    return relation


def _explain_by_norm(seen: Seen, stage: Stage, names: Collection[str]) -> None:
    """Where every gradient of a rank is off by one factor, and a wrong norm explains it, report the norm instead.

    Args:
        names: the gradients that are not 0.
    """
    for index, finding in enumerate(stage.findings):
        name = finding.name
        rank = finding.rank
        is_factor = "times what it" in finding.relation or "times (one over" in finding.relation
        if rank is None or finding.count < len(names) or not is_factor:
            continue
        gradient = seen.expected.gradients[name]
        tensors = _left_by_step(seen, name) or seen.by_rank("gradients", name)
        value = seen.own(name, rank, tensors)
        if gradient is None or value is None:
            continue
        expected = seen.places[rank][name].of(gradient.local)
        # Clipping divides by the norm: a norm that is too small leaves gradients too large.
        ratio = widest(expected).norm() / widest(value).norm()
        relation = _explained_norm(seen, ratio.item(), rank)
        if ": " in relation:
            stage.findings[index] = replace(finding, name=NORM, relation=relation, count=1)


def _gradient(
    seen: Seen,
    stage: Stage,
    name: str,
    rank: int,
    tensors: ByRank,
    full: LocalTensor | None,
    is_left: bool = False,
) -> float:
    """Compare a rank's gradient with what it should be, and add a finding if it is too far off.

    Args:
        name: the parameter.
        rank: the rank.
        tensors: by rank, its gradient.
        full: the gradient on one device.
        is_left: whether it is the gradient as the optimizer's step leaves it.

    Returns:
        How far it is off, relative.
    """
    if full is None:
        value = reduced(tensors, rank)
        # Zeros are as good as None.
        if value is None or size_of(value) == 0:
            return 0.0
        stage.find(seen, name, rank, "has a gradient, but has none on one device", math.inf)
        return math.inf
    value = seen.own(name, rank, tensors)
    expected = seen.own_part(name, rank, tensors, full.local)
    # No part of the parameter is on this rank, or it is compared under its other name.
    if expected is None or name in seen.aliases[rank]:
        return 0.0
    if value is None:
        # None is as good as zeros.
        if size_of(expected) == 0:
            return 0.0
        why = _why_elsewhere(seen, name, rank)
        if why:
            # The first reason is the one that is reported.
            stage.reason = stage.reason or why
            return 0.0
    scale = seen.tolerance.scale(name, full.local)
    error = math.inf if value is None else relative(value, expected, scale)
    if error <= seen.tolerance.gradient(name):
        return error
    # What counts is what the update used: the step may average gradients itself.
    left = _left_by_step(seen, name)
    if left and not is_left:
        stage.judged = LEFT_BY_STEP
        expected_left = seen.expected.left.get(name, seen.expected.gradients[name])
        return _gradient(seen, stage, name, rank, left, expected_left, is_left=True)
    relation = _relation(seen, stage, "gradients", name, rank, tensors, expected, full.local, scale)
    if KEPT in relation and _is_clipped_first(seen, name):
        relation = CLIPPED_FIRST
    elif NEVER in relation and _is_made_one(seen, name, error):
        stage.judged = BY_WEIGHTS
        stage.made_one.add(name)
        return 0.0
    stage.find(seen, name, rank, relation, error)
    return error


def _left_by_step(seen: Seen, name: str) -> ByRank:
    """By rank, a gradient as the optimizer's step leaves it. Empty if it has changed it on no rank."""
    left = seen.by_rank("left", name)
    if not any(left):
        return []
    return [changed or own for changed, own in zip(left, seen.by_rank("gradients", name), strict=True)]


def _is_clipped_first(seen: Seen, name: str) -> bool:
    """Whether the ranks' gradients differ before clipping, and what the optimizers got is one gradient."""
    if not seen.expected.norms:
        return False
    first, *others = seen.by_rank("gradients", name)
    if first is None:
        return False
    return all(other is not None and same_elements(other.local, first.local) for other in others)


def _is_made_one(seen: Seen, name: str, error: float) -> bool:
    """Whether all ranks have one weight, bit for bit, after steps by gradients of their own: they average it.

    Args:
        name: the weight.
        error: how far a rank's own gradient is off, relative. By so much another step would differ, which has to be
            more than what is not seen.
    """
    full = seen.expected.after[name].local
    tensors = seen.by_rank("after", name)
    # What a rank should have → what the first such rank has.
    first: dict[bytes, Tensor] = {}
    for rank in range(len(seen.ranks)):
        own = seen.own(name, rank, tensors)
        expected = seen.own_part(name, rank, tensors, full)
        if own is None or expected is None:
            continue
        if not same_elements(own, first.setdefault(bytes_of(expected), own)):
            return False
    before = seen.reference.observed.after if seen.step else seen.reference.observed.weights
    moved = min(1.0, error) * size_of(full - before[name].local)
    return moved > RESOLVED * seen.tolerance.weight(name) * finite_size_of(full)


def _why_elsewhere(seen: Seen, name: str, rank: int) -> str:
    """Why a missing gradient cannot be compared: it is somewhere else, or used up. Empty if it is just missing."""
    parallel = seen.ranks[rank].parallel
    if name in parallel.main_gradients:
        return f"the gradient of {name} is in its main_grad, and not in its grad, where the optimizer would take it"
    if name in parallel.stepped - seen.reference.observed.stepped:
        return f"{name} changes in backward, and its gradient is then gone: an optimizer steps inside of it"
    return ""


def step(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Compare parameters and buffers after the optimizer's step, and the loss of the batch with them."""
    stage = begin("step", seen, done)
    for rank in seen.ranks:
        stepped = sorted(rank.parallel.stepped - seen.reference.observed.stepped)
        if stepped:
            stage.reason = f"{stepped[0]} changes before the optimizer's step: one steps inside of backward"
            return stage
    stage.error = worst(_compare_after(seen, stage))
    second = seen.expected.second
    if not stage.findings and second is not None and second.loss is not None:
        reading = _read_loss(replace(seen, step=1), stage)
        if reading.wrong:
            stage.find(seen, "the loss after it", None, reading.wrong, reading.error)
    optimizer = seen.observed[0].optimizer
    if stage.findings and optimizer and seen.subject.optimizer_fn is plain_sgd:
        stage.findings.clear()
        stage.reason = (
            f"the program takes its step with an optimizer of its own, {optimizer}, and one device with verify's "
            "SGD: give one device the same, --optimizer"
        )
    elif stage.clean:
        stage.compared = f"same: weights, buffers and loss after the step, within {stage.error:.0e}"
    return stage


def _compare_after(seen: Seen, stage: Stage) -> Iterator[float]:
    """Compare parameters and buffers after a step. Yields how far each is off."""
    yield 0.0
    for name, full in seen.expected.after.items():
        tensors = seen.by_rank("after", name)
        expected_full = full.local
        scale = finite_size_of(full.local)
        tolerance = seen.tolerance.weight(name)
        ignored = rounding_mask(seen.reference, seen.tolerances[: seen.step + 1], name)
        if ignored is not None:
            expected_full = full.local.masked_fill(ignored, 0)
            tensors = _masked(seen, name, tensors, ignored)
        for rank, tensor in enumerate(tensors):
            place = seen.places[rank].get(name)
            if tensor is None or place is None or name in seen.aliases[rank]:
                continue
            expected = place.of(expected_full)
            error = relative(place.unpadded(tensor.local), expected, scale)
            yield error
            if error <= tolerance:
                continue
            relation = _relation(seen, stage, "after", name, rank, tensors, expected, expected_full, scale)
            if relation != FINER and _is_unchanged(seen, name, rank):
                relation = NOT_UPDATED
            elif name in stage.made_one:
                relation = MADE_ONE
            stage.find(seen, name, rank, relation, error)


def _is_unchanged(seen: Seen, name: str, rank: int) -> bool:
    """Whether a rank's weight is the same after the step as before it."""
    parallel = seen.ranks[rank].parallel
    before = parallel.after if seen.step else parallel.weights
    local_name = seen.names[rank].get(name, "")
    own = seen.observed[rank].after.get(local_name)
    if own is None or local_name not in before:
        return False
    return same_elements(before[local_name].local, own.local)


def _masked(seen: Seen, name: str, tensors: ByRank, ignored: Tensor) -> ByRank:
    """By rank, a weight with zeros where it is not compared.

    Args:
        name: the weight.
        tensors: by rank, what it has.
        ignored: a mask of the full weight.
    """
    masked: ByRank = []
    for rank, tensor in enumerate(tensors):
        place = seen.places[rank].get(name)
        if tensor is None or place is None:
            masked.append(tensor)
            continue
        local = tensor.local.clone()
        own = place.unpadded(local)
        mask = place.of(ignored)
        if own.shape == mask.shape:
            # A view of `local`: padding stays as it is.
            own.masked_fill_(mask, 0)
        masked.append(replace(tensor, local=local))
    return masked


def second_step(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Compare gradients, parameters and buffers of a second step, from the weights that the first has made."""
    stage = begin("step 2", seen, done)
    if seen.expected.second is None:
        return stage
    seen = replace(seen, step=1)
    _compare_gradients(seen, stage)
    wrong = stage.wrong(_names_backward(seen))
    if wrong:
        stage.first = f"second step, gradient of {wrong[0]}"
    if not stage.findings:
        stage.error = worst([stage.error or 0.0, *_compare_after(seen, stage)])
    if stage.findings and not wrong:
        stage.first = f"second step, {stage.findings[0].name}"
    elif stage.clean:
        stage.compared = f"same: gradients, weights and buffers, within {stage.error:.0e}"
    return stage


STAGES: tuple[Compare, ...] = (weights, samples, loss, gradients, step, second_step)
