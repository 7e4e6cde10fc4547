"""Where the outputs of modules part: only to say where; what decides are weights, loss and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of, finite_size_of, relative, size_of
from mmm_verify.observe import LocalTensor
from mmm_verify.rank import RankObserved
from mmm_verify.reference import Reference, innermost_first
from mmm_verify.relations import ALIKE, place_of, relation
from mmm_verify.subject import Subject
from mmm_verify.torch_private import tree_leaves


def rows_of_batch(local: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[int] | None:
    """Which samples of the batch a rank has, by the rows of its first tensor: of samples that are alike in it, as two
    atoms of a kind are, the first. None where they are no whole rows."""
    if not local or not tensors or local[0].shape[1:] != tensors[0].shape[1:]:
        return None
    known: dict[bytes, int] = {}
    for number, row in enumerate(tensors[0]):
        known.setdefault(bytes_of(row), number)
    rows = [known.get(bytes_of(row)) for row in local[0]]
    return None if any(row is None for row in rows) else [row for row in rows if row is not None]


def samples_of_rank(
    subject: Subject, reference: Reference, ranks: Sequence[RankObserved], batch: Any, rank: int
) -> list[int]:
    """The samples of a rank; all of them where they cannot be said."""
    samples = reference.samples
    if subject.local_batch_fn is None:
        part, parts = subject.batch_part(rank), subject.parts
        return list(range(part * samples // parts, (part + 1) * samples // parts))
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    known = rows_of_batch(tensors, tensors)
    if known != list(range(samples)):  # some are alike
        return list(range(samples))
    return rows_of_batch(ranks[rank].batch, tensors) or list(range(samples))


def of_samples(full: Tensor, rows: list[int], samples: int) -> Tensor:
    """What an output for all samples has of some, wherever the samples lie in its shape; all of it if nowhere."""
    if len(rows) == samples and rows == list(range(samples)):
        return full
    index = torch.tensor(rows)
    if full.ndim and full.shape[0] and full.shape[0] % samples == 0:  # samples, or samples times tokens
        return full.unflatten(0, (samples, -1)).index_select(0, index).flatten(0, 1)
    if full.ndim > 1 and full.shape[1] == samples:
        return full.index_select(1, index)
    return full


def first_wrong_module(subject: Subject, reference: Reference, ranks: Sequence[RankObserved], batch: Any) -> str:
    """The first module whose output is not that of one device on some rank, with the relation. Empty where each is."""
    rows = [samples_of_rank(subject, reference, ranks, batch, rank) for rank in range(len(ranks))]
    for name in innermost_first(reference.observed):
        calls = reference.observed.outputs[name]
        if len(calls) != 1:
            continue
        for index, output in enumerate(calls[0]):
            outputs = [joined_calls(rank, name, index) for rank in ranks]
            expected = [of_samples(output.local, rows[rank], reference.samples) for rank in range(len(ranks))]
            for rank in range(len(ranks)):
                words = _wrong(subject, outputs, expected, rank, name, index, ranks)
                if words:
                    return f"the output of {name or 'the model'} on rank {rank}: {words}"
    return ""


def joined_calls(rank: RankObserved, name: str, index: int) -> LocalTensor | None:
    """One of a module's outputs, its micro-batches one after the other. None where the rank has no such output."""
    recorded = rank.parallel.outputs
    under = name if name in recorded else next((full for full in recorded if name and full.endswith(f".{name}")), "")
    calls = [call for call in recorded.get(under, []) if len(call) > index] if under == name or under else []
    if not calls:
        return None
    if len(calls) == 1:
        return calls[0][index]
    tensors = [call[index].local for call in calls]
    if any(not t.ndim or t.shape[1:] != tensors[0].shape[1:] for t in tensors):
        return None
    return LocalTensor(torch.cat(tensors), None, calls[0][index].partial)


def _wrong(
    subject: Subject,
    outputs: list[LocalTensor | None],
    expected: list[Tensor],
    rank: int,
    name: str,
    index: int,
    ranks: Sequence[RankObserved],
) -> str:
    """What a rank's output is instead of a part of what it should be. Empty where it is one, or cannot be said."""
    own, full = outputs[rank], expected[rank]
    if own is None or not full.is_floating_point() or full.numel() == 1:  # one number is a loss, and no sample's
        return ""
    ought = full
    if own.part is not None:
        place = place_of(own, full)
        if place is None:
            return ""
        ought = place.of(full)
    elif own.local.shape != full.shape:
        parts = _parts(subject, own.local, full, rank)
        if not parts:
            return ""
        ought = next((part for part in parts if relative(own.local, part, size_of(full)) <= ALIKE), parts[0])
    scale = finite_size_of(full)
    if relative(own.local, ought, scale) <= ALIKE:
        return ""
    for axis in subject.axes:
        group = [outputs[other] for other in subject.group(rank, axis)]
        if own.partial or (own.part is None and axis not in subject.batch_axes):
            locals_ = [one.local for one in group if one is not None and one.local.shape == own.local.shape]
            if len(locals_) == len(group) and relative(torch.stack(locals_).sum(0), ought, scale) <= ALIKE:
                return ""  # a sum that a later module makes
    alone = ranks[rank].alone
    calls = alone.outputs.get(name, []) if alone is not None else []
    by_itself = calls[0][index].local if len(calls) == 1 and len(calls[0]) > index else None

    def others(other: int) -> tuple[Tensor | None, Tensor | None]:
        theirs = outputs[other]
        return (None if theirs is None else theirs.local), None

    return relation(own.local, ought, scale, rank, others, by_itself, subject)


def _parts(subject: Subject, local: Tensor, full: Tensor, rank: int) -> list[Tensor]:
    """The parts of an output that have a plain tensor's shape, this rank's along some axis first."""
    if local.ndim != full.ndim:
        return []
    shorter = [dim for dim in range(full.ndim) if local.shape[dim] != full.shape[dim]]
    if len(shorter) != 1:
        return []
    dim = shorter[0]
    parts = []
    for axis, size in subject.axes.items():
        if local.shape[dim] * size == full.shape[dim]:
            parts.append(full.narrow(dim, subject.places[rank][axis] * local.shape[dim], local.shape[dim]))
    return parts
