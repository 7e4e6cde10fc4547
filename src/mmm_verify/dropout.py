"""Compares what ranks drop, in a run with dropout on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmm_verify.difference import relative, size_of
from mmm_verify.observe import Observed
from mmm_verify.reference import ALIKE, Reference
from mmm_verify.subject import Subject
from mmm_verify.verdict import Finding


def dropout_findings(
    subject: Subject,
    loss_axes: Sequence[str],
    ranks: Sequence[Observed],
    tolerance: float,
) -> list[Finding]:
    """Check, with dropout on, that ranks with the same samples drop the same elements: their losses agree.

    Args:
        subject: the program.
        loss_axes: axes whose ranks have different losses without dropout too.
        ranks: what each rank saw with dropout.
        tolerance: how far two losses may be off, relative.

    Returns:
        The first finding, or nothing.
    """
    same_loss_axes = [axis for axis in subject.axes if axis not in (*subject.batch_axes, *loss_axes)]
    for rank in range(len(ranks)):
        for axis in same_loss_axes:
            # Every rank is compared with the first of its group.
            first = subject.group(rank, axis)[0]
            expected = ranks[first].loss
            loss = ranks[rank].loss
            # A partial loss is a summand of its own on each rank.
            if expected is None or loss is None or expected.partial or loss.partial:
                continue
            off = relative(loss.local, expected.local, size_of(expected.local))
            if not off <= tolerance:
                relation = (
                    f"ranks of {axis} drop different elements of the same activations: rank {first}'s loss differs"
                )
                return [Finding("dropout", "dropout", rank, relation, off)]
    return []


def dropout_advice(
    subject: Subject,
    reference: Reference,
    without: Sequence[Observed],
    ranks: Sequence[Observed],
) -> list[str]:
    """Advise against ranks with different elements that drop the same positions of them. It is not an error.

    Args:
        subject: the program.
        reference: the model on one device.
        without: what the ranks saw without dropout.
        ranks: what they saw with it.
    """
    for name, mask in ranks[0].drops.items():
        for rank in range(1, len(ranks)):
            other = ranks[rank].drops.get(name)
            if other is None or other.shape != mask.shape:
                continue
            if not mask.any() or not torch.equal(mask, other):
                continue
            if subject.part_index(rank) != subject.part_index(0):
                different = "samples"
            elif _have_shards(subject, reference, without[0], without[rank], name):
                different = "parts of the same samples"
            else:
                # Replicas have to drop the same.
                continue
            advice = (
                f"{name} drops the same places on ranks 0 and {rank}, which have different {different}: "
                "give each its own seed"
            )
            calls = without[0].outputs.get(name, [])
            if calls and calls[0] and calls[0][0].shard is not None:
                advice += ". DTensor does so by itself on an accelerator, but not on the CPU"
            return [advice]
    return []


def _have_shards(
    subject: Subject,
    reference: Reference,
    one: Observed,
    other: Observed,
    name: str,
) -> bool:
    """Whether two ranks have different parts of a module's output for the same samples."""
    firsts = []
    for observed in (reference.observed, one, other):
        calls = observed.outputs.get(name, [])
        if not calls or not calls[0]:
            return False
        firsts.append(calls[0][0].local)
    full, own, theirs = firsts
    # A rank with all channels and positions of its samples has full.numel() / n_parts elements.
    is_sharded = own.numel() * subject.n_parts < full.numel()
    return is_sharded and not relative(theirs, own, size_of(own)) <= ALIKE
