"""Finds which part of each sample a rank has: some rows of a field, a tile of it with a halo, or some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from torch import Tensor

from mmm_verify.difference import same_elements
from mmm_verify.observe import LocalTensor
from mmm_verify.program.recorder import Recording
from mmm_verify.program.samples import NEAR, Sample
from mmm_verify.relations import block_starts

# A field that is constant fits everywhere: nothing tells where its parts are.
MAX_STARTS = 64

# For each dim of a sample's first tensor: the indices that a rank has.
Block = tuple[range, ...]
# For each dim, the first index of a block.
Start = tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """Which part of each sample a rank has.

    Attributes:
        blocks: by rank, where its part is, in all of its samples.
        recordings: by rank, what it saw, with the full samples in place of its parts.
        shape: that of a full sample.
    """

    blocks: list[Block]
    recordings: list[Recording]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Which dims are cut, and how: ``dim 2 of 16 in 0:9, 7:16``. Dim 0 is that of the samples."""
        phrases = []
        for dim, size in enumerate(self.shape):
            ranges = {(block[dim].start, block[dim].stop) for block in self.blocks}
            if ranges == {(0, size)}:
                continue
            shown = [f"{start}:{stop}" for start, stop in sorted(ranges)]
            phrases.append(f"dim {dim + 1} of {size} in {', '.join(shown)}")
        return " and ".join(phrases)


def find_parts(one: Recording, ranks: Sequence[Recording]) -> Parts | None:
    """Find which part of each sample of one rank the ranks have. None if they have full samples, or it is not known."""
    full = list(chain(*one.samples))
    shape = _shape_of(full[0], ())
    # By rank, what it has of samples.
    all_own = []
    shapes: set[tuple[int, ...]] = set()
    for recording in ranks:
        own = list(chain(*recording.samples))
        all_own.append(own)
        shapes.update(_shape_of(sample, shape) for sample in own)
    if shapes == {shape}:
        return None
    parts = Parts([], [], shape)
    for recording, own in zip(ranks, all_own, strict=True):
        samples, starts = _locate(own, full)
        if len(starts) != 1:
            return None
        block = []
        for start, length in zip(starts.pop(), _shape_of(own[0], shape), strict=True):
            block.append(range(start, start + length))
        parts.blocks.append(tuple(block))
        # Step by step, as the rank has had its parts of them.
        samples_by_step = []
        for step in recording.samples:
            samples_by_step.append(samples[: len(step)])
            samples = samples[len(step) :]
        parts.recordings.append(replace(recording, samples=samples_by_step))
    return parts


def _shape_of(sample: Sample, full: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a rank's part of a sample. One whose inputs are not kept is a full one."""
    return full if sample.inputs is None else tuple(sample.inputs.shape)


def _starts_of(own: Sample, full: Sample) -> set[Start]:
    """Where a rank's part of a sample may begin in a full one of one rank, whose inputs are always kept."""
    assert full.inputs is not None
    if own.inputs is not None:
        return starts_in(own.inputs, full.inputs)
    return {(0,) * full.inputs.ndim} if own.is_like(full) else set()


def _locate(own: Sequence[Sample], full: Sequence[Sample]) -> tuple[list[Sample], set[Start]]:
    """The full samples of which a rank has parts, and where all of these may begin in them: nowhere if one is unknown.

    Args:
        own: the rank's parts.
        full: the samples of one rank, each of which is taken once.
    """
    samples: list[Sample] = []
    starts: set[Start] = set()
    remaining = list(full)
    for sample in own:
        for other in remaining:
            possible = _starts_of(sample, other)
            if samples:
                possible &= starts
            if possible:
                break
        else:
            return [], set()
        starts = possible
        samples.append(other)
        # Samples are equal only if they are one object.
        remaining.remove(other)
    return samples, starts


def starts_in(block: Tensor, full: Tensor) -> set[Start]:
    """Where a block of a tensor may begin. Empty if nowhere, or at too many places."""
    if block.dtype != full.dtype or block.ndim != full.ndim or not block.numel():
        return set()
    starts = set(islice(block_starts(block, full, NEAR), MAX_STARTS + 1))
    if len(starts) > MAX_STARTS:
        return set()
    return starts


def take_own_buffers(one: Recording, ranks: Sequence[Recording]) -> dict[str, list[LocalTensor]]:
    """Take buffers with which some rank begins otherwise out of all recordings: it may have a part, or its own place.

    Returns:
        By name, what each rank has.
    """
    by_name = {}
    first = one.steps[0]
    starts = [recording.steps[0].weights for recording in ranks]
    for name, full in first.weights.items():
        if name in first.parameters:
            continue
        own = [weights[name] for weights in starts if name in weights]
        is_like_full = [same_elements(tensor.local, full.local) for tensor in own]
        if not all(is_like_full):
            by_name[name] = own
    for recording in [one, *ranks]:
        for step in recording.steps:
            for name in by_name:
                step.weights.pop(name, None)
                step.after.pop(name, None)
    return by_name
