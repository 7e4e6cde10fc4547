"""Compares what ranks drop, with dropout on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmm_verify.difference import relative, size_of
from mmm_verify.observe import Observed
from mmm_verify.reference import TOLERANCE, Reference
from mmm_verify.relations import ALIKE
from mmm_verify.subject import Subject
from mmm_verify.verdict import Finding


def dropout_findings(subject: Subject, loss_axes: Sequence[str], ranks: Sequence[Observed]) -> list[Finding]:
    """With dropout on: whether ranks that hold the same samples agree on what is dropped.

    Args:
        loss_axes: those whose ranks have different losses without dropout too.
    """
    for rank in range(len(ranks)):
        for axis in set(subject.axes) - set(subject.batch_axes) - set(loss_axes):
            first = subject.group(rank, axis)[0]
            one, other = ranks[first].loss, ranks[rank].loss
            if one is None or other is None or one.partial or other.partial:
                continue
            off = relative(other.local, one.local, size_of(one.local))
            if not off <= TOLERANCE:
                words = f"ranks of {axis} drop different elements of the same activations: rank {first}'s loss differs"
                return [Finding("dropout", "dropout", rank, words, off)]
    return []


def dropout_advice(
    subject: Subject, reference: Reference, without: Sequence[Observed], ranks: Sequence[Observed]
) -> list[str]:
    """Where ranks with different elements drop the same of them, which is no fault.

    Args:
        without: what the ranks saw without dropout. ranks: with it.
    """
    for name, mask in ranks[0].drops.items():
        for rank in range(1, len(ranks)):
            theirs = ranks[rank].drops.get(name)
            if theirs is None or theirs.shape != mask.shape or not mask.any() or not torch.equal(mask, theirs):
                continue
            if subject.batch_part(rank) != subject.batch_part(0):
                different = "samples"
            elif _have_parts(subject, reference, without[0], without[rank], name):
                different = "parts of the same samples"
            else:
                continue
            places = f"{name} drops the same places on ranks 0 and {rank}"
            of_dtensor = any(call[0].part is not None for call in without[0].outputs.get(name, [])[:1] if call)
            by_itself = ". DTensor does so itself on an accelerator, and not on the CPU" if of_dtensor else ""
            return [f"{places}, which have different {different}: seed them apart{by_itself}"]
    return []


def _have_parts(subject: Subject, reference: Reference, one: Observed, other: Observed, name: str) -> bool:
    """Whether two ranks have different parts of a module's output for the same samples."""
    calls = [observed.outputs.get(name, []) for observed in (reference.observed, one, other)]
    if not all(of_one and of_one[0] for of_one in calls):
        return False
    full, own, theirs = (of_one[0][0].local for of_one in calls)
    return own.numel() * subject.parts < full.numel() and not relative(theirs, own, size_of(own)) <= ALIKE
