"""Compares what a script did on several ranks with what it did on one: first the samples, then everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import NoReturn

import torch

from mmm_verify.difference import finite_size_of, relative, same_elements
from mmm_verify.dtypes import dtype_name, widest
from mmm_verify.evaluate import Compare, evaluate, gradients, loss, second_step, step, weights
from mmm_verify.observe import LocalTensor, Observed
from mmm_verify.program.parts import Block, Parts, find_parts, take_own_buffers
from mmm_verify.program.recorder import Recording
from mmm_verify.program.samples import Sample, are_same, count_common
from mmm_verify.rank import RankObserved
from mmm_verify.reference import Reference
from mmm_verify.repeat import add_noise_of_step, why_not_finite, why_too_noisy
from mmm_verify.run import tolerance_in_words
from mmm_verify.seen import Seen, Stage, begin, look
from mmm_verify.subject import Subject
from mmm_verify.verdict import NOT_COMPARABLE, NOT_PARALLEL, Finding, Verdict


def compare(name: str, one: Recording, nudged: Sequence[Recording], ranks: Sequence[Recording]) -> Verdict:
    """Compare a script on several ranks with itself on one.

    Args:
        name: the script.
        one: what the run on one rank saw.
        nudged: the same from weights that were moved by one rounding, with other random numbers in forward.
        ranks: by rank, what it saw.
    """
    parts = find_parts(one, ranks) if one.samples[0] else None
    blocks: Sequence[Block] = [()] * len(ranks)
    if parts is not None:
        blocks = parts.blocks
        ranks = parts.recordings
    first_samples = [recording.samples[0] for recording in ranks]
    subject = _subject(first_samples, blocks)
    layout = f"{name}, {subject.layout}"
    dtype = dtype_name(one.dtype)
    not_comparable = Verdict(NOT_COMPARABLE, layout, len(ranks), dtype=dtype)
    # The first reason counts: the later functions need what the earlier ones have checked.
    reason = (
        why_not_watched(one)
        or why_not_finite(_observed(one))
        or _why_not_deterministic(one, nudged)
        or _why_other_samples(subject, one, ranks)
        or _why_not_covered(subject, parts)
    )
    if reason:
        return replace(not_comparable, reason=reason)
    subject = replace(subject, dtype=_compared_in(one))
    own_buffers = take_own_buffers(one, ranks) if parts else {}
    reference = _measure(one, nudged)
    if reference.reason:
        return replace(not_comparable, reason=reference.reason)
    observed = []
    for rank, recording in enumerate(ranks):
        # Along an axis of any name, ranks with other blocks have parts of the samples.
        batch = [torch.tensor([indices.start for indices in blocks[rank]])]
        # A script has no plain model that a rank could run by itself.
        observed.append(RankObserved(_observed(recording), alone=None, batch=batch))
    seen = look(subject, reference, observed, None)
    stages = (weights, partial(_samples, parts), _loss, gradients, step, second_step)
    verdict = evaluate(seen, stages)
    if parts is not None and verdict.findings and all(finding.stage == "loss" for finding in verdict.findings):
        verdict = _by_gradients(seen, stages, verdict.findings[0])
    verdict = replace(verdict, layout=layout, dtype=dtype)
    for finding in verdict.findings:
        # Replicas that differ from rank 0's are findings of other ranks. Here rank 0 itself began otherwise.
        if finding.stage == "weights" and finding.rank == 0 and "differ" in finding.relation:
            reason = (
                f"the ranks begin with other weights than one rank, such as {finding.name}: draw them from one seed "
                "before the model is sharded, or load one checkpoint in both"
            )
            return replace(not_comparable, reason=reason)
    verdict = _with_buffers(verdict, own_buffers, blocks)
    if verdict.same and parts is None and _is_one_run(seen):
        verdict = replace(
            verdict,
            result=NOT_PARALLEL,
            layout=name,
            reason=f"{len(ranks)} ranks did the same run, each with all samples and weights, and none helps another",
        )
    compared = {
        "runs": "deterministic on one rank",
        "tolerance": tolerance_in_words(reference),
        **verdict.compared,
    }
    return replace(verdict, compared=compared)


def _by_gradients(seen: Seen, stages: Sequence[Compare], finding: Finding) -> Verdict:
    """Compare all but losses. A rank may go backward from the mean over its own part, and weigh its gradients later.

    Args:
        finding: what was found of the losses, where all gradients are right.
    """
    second = seen.expected.second
    assert second is not None
    without_loss = replace(seen.expected, second=replace(second, loss=None))
    seen = replace(seen, reference=replace(seen.reference, observed=without_loss))
    verdict = evaluate(seen, [stage for stage in stages if stage is not _loss])
    note = f"the loss {finding.relation}: each rank goes backward from one of its own, and the gradients are right"
    return replace(verdict, notes=(*verdict.notes, note))


def _with_buffers(verdict: Verdict, buffers: Mapping[str, Sequence[LocalTensor]], blocks: Sequence[Block]) -> Verdict:
    """Add what is known of buffers of which each rank may have its own part.

    Args:
        buffers: by name, what each rank has.
        blocks: by rank, its part of each sample.
    """
    if not buffers:
        return verdict
    findings = list(verdict.findings)
    for name, (first, *others) in buffers.items():
        for rank, own in enumerate(others, 1):
            # A single number, such as a count of rows, may well be the same.
            has_other_part = own.local.ndim > 0 and blocks[rank] != blocks[0]
            if findings and has_other_part and same_elements(own.local, first.local):
                relation = "is that of rank 0, and this rank has another part of the samples"
                findings.append(Finding("weights", name, rank, relation))
                break
    note = f"not compared, as a rank may have its own part of it or place in it: {', '.join(buffers)}"
    return replace(verdict, findings=tuple(findings), notes=(*verdict.notes, note))


def _observed(recording: Recording) -> Observed:
    """The steps of a recording as `evaluate` reads them."""
    first, second = recording.steps
    return replace(first, second=second)


def _subject(samples: Sequence[list[Sample]], blocks: Sequence[Block]) -> Subject:
    """A mesh that explains which ranks have the same samples, and the same parts of them.

    Args:
        samples: by rank, its samples of the first step.
        blocks: by rank, which part of each it has.
    """
    n_ranks = len(samples)
    alike = [rank for rank, own in enumerate(samples) if are_same(own, samples[0])]
    # Ranks with the same part of the samples of rank 0 are taken for its tp group.
    tp = sum(blocks[rank] == blocks[0] for rank in alike)
    sizes = {"dp": n_ranks // len(alike), "cp": len(alike) // tp, "tp": tp}
    orders = permutations(sizes) if math.prod(sizes.values()) == n_ranks else ()
    # The first axis is the outermost one.
    for order in orders:
        subject = _with_batch_axes({axis: sizes[axis] for axis in order}, samples)
        if _explains(subject, samples, blocks):
            return subject
    return _with_batch_axes({"dp": n_ranks}, samples)


def _with_batch_axes(axes: Mapping[str, int], samples: Sequence[list[Sample]]) -> Subject:
    """A mesh whose batch axes are those along which the ranks have different samples."""
    subject = Subject(
        model_fn=_no_function,
        parallelize_fn=_no_function,
        batch_fn=_no_function,
        step_fn=_no_function,
        axes={axis: size for axis, size in axes.items() if size > 1},
        batch_axes=(),
        local_batch_fn=None,
        optimizer_fn=_no_function,
    )
    batch_axes = []
    # Rank 0 and those that differ from it only in this coordinate.
    for axis in subject.axes:
        samples_of_group = [samples[rank] for rank in subject.group(0, axis)]
        if not all(are_same(own, samples[0]) for own in samples_of_group):
            batch_axes.append(axis)
    return replace(subject, batch_axes=tuple(batch_axes))


def _no_function(*args: object) -> NoReturn:
    raise AssertionError("a script is one program: it has no functions for a model, a batch or a step")


def _explains(subject: Subject, samples: Sequence[list[Sample]], blocks: Sequence[Block]) -> bool:
    """Whether two ranks have the same samples, and parts of them, exactly where the mesh gives both the same ones."""
    cp = [coordinates.get("cp") for coordinates in subject.coordinates]
    for rank, own in enumerate(samples):
        for other, theirs in enumerate(samples[:rank]):
            same_part = subject.part_index(rank) == subject.part_index(other)
            if same_part != are_same(own, theirs):
                return False
            if (cp[rank] == cp[other]) != (blocks[rank] == blocks[other]):
                return False
    return True


def why_not_watched(one: Recording) -> str:
    """Say what was not seen of a script on one rank. Empty if all was that a comparison needs."""
    if not one.samples[0]:
        return (
            "no nn.Module is called with tensors in training mode (model.train()), so that it is not known which "
            "samples a rank has"
        )
    if one.steps[0].loss is None or one.steps[1].loss is None:
        return "no loss was seen on one rank: backward() of a single number was not called before each step"
    if not any(gradient is not None for gradient in one.steps[0].gradients.values()):
        return "no parameter has a gradient on one rank"
    return ""


def _why_not_deterministic(one: Recording, nudged: Sequence[Recording]) -> str:
    """Say what a second run on one rank did otherwise. Empty if it only rounds otherwise."""
    # The weights of the other runs were moved by one rounding: the rest is margin.
    two_roundings = 2 * torch.finfo(one.dtype).eps
    for again in nudged:
        for index in range(len(one.steps)):
            if not are_same(again.samples[index], one.samples[index]):
                return (
                    f"not deterministic: a second run on one rank drew other samples in step {index + 1}. Seed all "
                    "that draws them, such as torch.manual_seed(0) at the beginning"
                )
        for name, weight in one.steps[0].weights.items():
            error = math.inf
            other = again.steps[0].weights.get(name)
            if other is not None:
                scale = finite_size_of(weight.local)
                error = relative(other.local, weight.local, scale)
            # Written with `not`, for NaN.
            if not error <= two_roundings:
                return (
                    f"not deterministic: {name} has other initial weights in a second run on one rank. Seed before "
                    "the model is made, such as by torch.manual_seed(0)"
                )
    return ""


def _why_other_samples(subject: Subject, one: Recording, ranks: Sequence[Recording]) -> str:
    """Say in which step all ranks together have not drawn the samples of one rank. Empty if they always have."""
    for index, expected in enumerate(one.samples):
        # Ranks with one part of the batch have the same samples: they count once.
        samples_of_part = {}
        for rank, recording in enumerate(ranks):
            samples_of_part[subject.part_index(rank)] = recording.samples[index]
        drawn: list[Sample] = []
        for own in samples_of_part.values():
            drawn += own
        if are_same(drawn, expected):
            continue
        n_common = count_common(drawn, expected)
        reason = f"the ranks drew other samples: in step {index + 1}, "
        # How many samples stand in the list for a second time.
        n_repeated = 0
        for place, sample in enumerate(drawn):
            n_repeated += count_common([sample], drawn[:place])
        if len(drawn) == len(expected):
            return (
                f"{reason}{n_common} of {len(expected)} are those of one rank. Draw them in one order on any number "
                "of ranks: by a DistributedSampler with the same seed, also on one rank"
            )
        reason += f"one rank had {len(expected)}, and {len(ranks)} ranks had {len(drawn)}"
        has_all_once = len(drawn) - n_repeated == len(expected) == n_common
        # A sampler that fills the last round repeats fewer than one sample for each rank.
        if has_all_once and n_repeated < len(ranks):
            return (
                f"{reason}, {n_repeated} of them twice: a DistributedSampler repeats samples where they do not divide "
                "over the ranks"
            )
        if not subject.batch_axes:
            return f"{reason}, all of them on every rank: does a DistributedSampler give each rank its own?"
        return (
            f"{reason}. If the batch size is that of a rank, give one rank the global one, as by --one-rank-args "
            f'"--batch-size {len(drawn)}". Where ranks have parts of a sample, each has to be one block of what one '
            "rank has"
        )
    return ""


def _why_not_covered(subject: Subject, parts: Parts | None) -> str:
    """Say what of the samples is on no rank. Empty if nothing is."""
    if parts is None:
        return ""
    covered = torch.zeros(subject.n_parts, *parts.shape, dtype=torch.bool)
    for rank, block in enumerate(parts.blocks):
        own = [slice(indices.start, indices.stop) for indices in block]
        covered[subject.part_index(rank)][tuple(own)] = True
    missing = (~covered).nonzero()
    if not len(missing):
        return ""
    # The part of the batch, and the place in each of its samples.
    _, *place = missing[0].tolist()
    return f"of the samples of {parts.shape}, {parts}, {len(missing)} elements are on no rank, such as that at {place}"


def _measure(one: Recording, nudged: Sequence[Recording]) -> Reference:
    """The run on one rank, with how far rounding moves all that is compared."""
    reference = Reference({}, _observed(one), len(one.samples[0]), dtype=_compared_in(one), computes_in=one.dtype)
    draws = [_observed(recording) for recording in nudged]
    # By draw, how far its initial weights are from those of the model. A step's noise does not include that.
    shifts = []
    for draw in draws:
        shift = {}
        for name in reference.observed.parameters:
            weight = widest(reference.observed.weights[name].local)
            shift[name] = widest(draw.weights[name].local) - weight
        shifts.append(shift)
    # eps is the distance from 1 to the next number: rounding is off by half of it at most.
    rounding = torch.finfo(one.dtype).eps / 2
    add_noise_of_step(reference, reference.step(0), draws, shifts, rounding)
    seconds = [draw.second for draw in draws if draw.second is not None]
    add_noise_of_step(reference, reference.step(1), seconds, shifts, rounding)
    reference.reason = why_too_noisy(reference)
    if reference.reason:
        reference.reason += ". Random numbers that a model draws in its forward move it as far"
    if one.has_dropout:
        reference.notes.append("dropout is off in all runs: its rates were set to 0 before the first forward")
    if one.batch_norms:
        reference.notes.append(
            f"{one.batch_norms[0]} is a batch norm: each rank computes it over its own samples, one rank over all of "
            "them, so that they differ; nn.SyncBatchNorm needs a GPU"
        )
    return reference


def _compared_in(one: Recording) -> torch.dtype:
    """The type by which margins are chosen. float16 has the margins of bf16."""
    if one.dtype.itemsize == 2:
        return torch.bfloat16
    return one.dtype


def _samples(parts: Parts | None, seen: Seen, done: Sequence[Stage]) -> Stage:
    """Say how the samples are split. `compare` has checked already that the ranks have the samples of one rank."""
    stage = begin("batch", seen, done)
    n_parts = seen.subject.n_parts
    where = f"in {n_parts} parts" if n_parts > 1 else "on every rank"
    if parts is not None:
        where = f"in {n_parts} parts, each cut: {parts}" if n_parts > 1 else f"cut: {parts}"
    stage.compared = f"the same {seen.reference.samples} samples, {where}; as many and the same in step 2"
    return stage


def _loss(seen: Seen, done: Sequence[Stage]) -> Stage:
    """Compare the loss. If it is wrong, the gradients show where: what modules return is not recorded."""
    stage = loss(seen, done)
    if stage.findings:
        stage.findings += gradients(seen, done).findings
        stage.first = "the loss"
    return stage


def _is_one_run(seen: Seen) -> bool:
    """Whether each rank has all samples and all weights, as one rank has."""
    if seen.subject.n_parts > 1:
        return False
    for name, full in seen.reference.observed.weights.items():
        for tensor in seen.by_rank("weights", name):
            if tensor is None or tensor.local.shape != full.local.shape:
                return False
    return True
