"""Finds which part of each sample a rank has: some rows of a field, a tile of it with a halo, or some tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmm_verify.difference import same_elements
from mmm_verify.observe import LocalTensor
from mmm_verify.program.recorder import Recording
from mmm_verify.program.samples import NEAR, Sample

# Where a block may begin is first asked of so many of its elements.
PROBES = 16
# A field that is constant fits everywhere: nothing tells where its parts are.
MAX_STARTS = 64
# How many of the ranks' parts are shown.
MAX_SHOWN = 4

# For each dim of a sample's first tensor: the first index, and the one after the last one.
Bounds = tuple[tuple[int, int], ...]


class Parts:
    """Which part of each sample a rank has.

    Attributes:
        bounds: by rank, where its part is; the same in all of its samples.
        recordings: by rank, what it saw, with the full samples in place of its parts.
    """

    def __init__(self, bounds: Sequence[Bounds], recordings: Sequence[Recording], shape: Sequence[int]) -> None:
        self.bounds = bounds
        self.recordings = recordings
        self.shape = shape

    def why_not_covered(self, ranks: Iterable[int]) -> str:
        """Say which elements of their samples none of some ranks has. Empty if they have all of them."""
        is_covered = torch.zeros(tuple(self.shape), dtype=torch.bool)
        for rank in ranks:
            block_of(is_covered, self.bounds[rank]).fill_(True)
        missing = (~is_covered).nonzero()
        if not len(missing):
            return ""
        return (
            f"{len(missing)} elements of each sample of {tuple(self.shape)} are on no rank, such as that at "
            f"{tuple(missing[0].tolist())}"
        )

    def __str__(self) -> str:
        """The dims that are cut, with the parts of each; dims as the model sees them, with the samples along dim 0."""
        phrases = []
        for dim, size in enumerate(self.shape):
            ranges = sorted({bounds[dim] for bounds in self.bounds})
            if ranges == [(0, size)]:
                continue
            shown = [f"{start}:{end}" for start, end in ranges[:MAX_SHOWN]]
            if len(ranges) > MAX_SHOWN:
                shown.append("…")
            phrases.append(f"dim {dim + 1} of {size} in {', '.join(shown)}")
        return " and ".join(phrases)


def find_parts(one: Recording, ranks: Sequence[Recording]) -> Parts | None:
    """Find which part of each sample of one rank the ranks have. None if they have full samples, or it is not known."""
    all_bounds = []
    recordings = []
    for recording in ranks:
        samples_by_step = []
        seen: set[Bounds] = set()
        for own, full in zip(recording.samples, one.samples, strict=True):
            located = _locate(own, full)
            if located is None:
                return None
            samples, bounds = located
            samples_by_step.append(samples)
            seen.add(bounds)
        if len(seen) > 1:
            return None
        all_bounds.append(seen.pop())
        recordings.append(replace(recording, samples=samples_by_step))
    shape = one.samples[0][0].inputs.shape
    whole = tuple((0, size) for size in shape)
    if all(bounds == whole for bounds in all_bounds):
        return None
    return Parts(all_bounds, recordings, shape)


def _locate(own: Sequence[Sample], full: Sequence[Sample]) -> tuple[list[Sample], Bounds] | None:
    """The samples whose parts a rank has, and where these are in them. None if that is not known.

    Args:
        own: the rank's samples, or parts of them.
        full: the samples of one rank.
    """
    samples = []
    remaining = list(full)
    # Where all parts so far may begin.
    starts: Tensor | None = None
    for sample in own:
        for other in remaining:
            possible = starts_in(sample.inputs, other.inputs)
            if starts is not None and possible is not None:
                if possible.shape != starts.shape:
                    return None
                possible &= starts
            if possible is not None and possible.any():
                break
        else:
            return None
        starts = possible
        samples.append(other)
        remaining.remove(other)
    if starts is None or starts.sum() != 1:
        return None
    (start,) = starts.nonzero().tolist()
    bounds = []
    for first, length in zip(start, own[0].inputs.shape, strict=True):
        bounds.append((first, first + length))
    return samples, tuple(bounds)


def starts_in(part: Tensor, full: Tensor) -> Tensor | None:
    """Where a block of a tensor may begin.

    Returns:
        A mask of the possible first elements: for each dim, (size - length + 1). None if there is none, or too many.
    """
    if part.dtype != full.dtype or part.ndim != full.ndim or not part.numel():
        return None
    counts = []
    for size, length in zip(full.shape, part.shape, strict=True):
        counts.append(size - length + 1)
    if min(counts, default=1) < 1:
        return None
    possible = torch.ones(counts, dtype=torch.bool)
    places = torch.linspace(0, part.numel() - 1, PROBES).long()
    for place in torch.stack(torch.unravel_index(places, part.shape), 1).tolist():
        window = []
        for index, count in zip(place, counts, strict=True):
            window.append((index, index + count))
        possible &= _alike(block_of(full, window), part[tuple(place)])
    starts = possible.nonzero().tolist()
    if not 0 < len(starts) <= MAX_STARTS:
        return None
    for start in starts:
        bounds = []
        for first, length in zip(start, part.shape, strict=True):
            bounds.append((first, first + length))
        possible[tuple(start)] = _alike(block_of(full, bounds), part).all()
    return possible


def block_of(tensor: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """A block of a tensor, as a view."""
    for dim, (start, end) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, end - start)
    return tensor


def _alike(own: Tensor, full: Tensor) -> Tensor:
    """Where two tensors have the same element, but for rounding. A NaN is the same as a NaN."""
    if not own.is_floating_point():
        return own == full
    return torch.isclose(own, full, rtol=NEAR, atol=0.0, equal_nan=True)


def take_own_buffers(one: Recording, ranks: Sequence[Recording]) -> dict[str, list[LocalTensor]]:
    """Take buffers with which some rank begins otherwise out of all recordings: it may have a part, or its own place.

    Returns:
        By name, what each rank has.
    """
    own_buffers = {}
    for name, full in one.steps[0].weights.items():
        starts = [recording.steps[0].weights for recording in ranks]
        if name in one.steps[0].parameters or not all(name in weights for weights in starts):
            continue
        by_rank = [weights[name] for weights in starts]
        if not all(same_elements(own.local, full.local) for own in by_rank):
            own_buffers[name] = by_rank
    for recording in [one, *ranks]:
        for step in recording.steps:
            for name in own_buffers:
                step.weights.pop(name, None)
                step.after.pop(name, None)
    return own_buffers
