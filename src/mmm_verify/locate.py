"""Finds the first module whose output differs. It only says where: weights, loss and gradients decide the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmm_verify.difference import bytes_of, finite_size_of, index_of_rows, relative, size_of
from mmm_verify.observe import LocalTensor, innermost_first
from mmm_verify.rank import RankObserved
from mmm_verify.relations import Pair, describe_relation, dims_of_other_size, place_of
from mmm_verify.seen import Seen
from mmm_verify.subject import Subject, part_range
from mmm_verify.torch_private import tensors_in


def rows_of_batch(local: Sequence[Tensor], batch: Sequence[Tensor]) -> list[int] | None:
    """Which samples of the batch a rank has, according to the rows of its first tensor.

    Samples that are alike in that tensor, such as two atoms of one kind, get the index of the first of them.

    Args:
        local: the tensors of the rank's batch.
        batch: the tensors of the global batch.

    Returns:
        The samples' indices; None if the rank's rows are not rows of the batch.
    """
    if not local or not batch:
        return None
    if local[0].shape[1:] != batch[0].shape[1:]:
        return None
    index_of_row = index_of_rows(batch[0])
    rows = []
    for row in local[0]:
        content = bytes_of(row)
        if content not in index_of_row:
            return None
        rows.append(index_of_row[content])
    return rows


def samples_of_rank(seen: Seen, rank: int) -> list[int]:
    """The indices of a rank's samples; all samples if it cannot be said which."""
    subject = seen.subject
    everything = list(range(seen.reference.samples))
    if subject.local_batch_fn is None:
        return list(part_range(len(everything), subject.part_index(rank), subject.n_parts))
    tensors = tensors_in(seen.batch)
    # If some samples are alike, their rows do not tell them apart.
    if rows_of_batch(tensors, tensors) != everything:
        return everything
    return rows_of_batch(seen.ranks[rank].batch, tensors) or everything


def of_samples(full: Tensor, rows: list[int], n_samples: int) -> Tensor:
    """The part of an output that belongs to some samples, along the dim that has them; all of it if no dim does.

    Args:
        full: the output for all samples.
        rows: the samples' indices.
        n_samples: number of all samples.
    """
    if rows == list(range(n_samples)):
        return full
    index = torch.tensor(rows)
    # (samples, …), or (samples · tokens, …) as in an MLP of experts.
    if full.ndim and full.shape[0] and full.shape[0] % n_samples == 0:
        return full.unflatten(0, (n_samples, -1)).index_select(0, index).flatten(0, 1)
    # (positions, samples, …), as in PyTorch's own attention.
    if full.ndim > 1 and full.shape[1] == n_samples:
        return full.index_select(1, index)
    return full


def first_wrong_module(seen: Seen) -> str:
    """Name the first module whose output on a rank is not that on one device, and say how. Empty if there is none."""
    reference = seen.reference
    ranks = range(len(seen.ranks))
    rows = [samples_of_rank(seen, rank) for rank in ranks]
    for name in innermost_first(reference.observed):
        calls = reference.observed.outputs[name]
        # Calls of a module that is called several times cannot be told from its micro-batches.
        if len(calls) != 1:
            continue
        for index, output in enumerate(calls[0]):
            outputs = [joined_calls(observed, name, index) for observed in seen.ranks]
            for rank in ranks:
                expected = of_samples(output.local, rows[rank], reference.samples)
                difference = _wrong(seen, outputs, expected, rank, name, index)
                if difference:
                    return f"output of {name or 'the model'} on rank {rank}: {difference}"
    return ""


def joined_calls(rank: RankObserved, name: str, index: int) -> LocalTensor | None:
    """One of a module's outputs, with those for its micro-batches joined. None if the rank has no such output.

    Args:
        rank: what the rank saw.
        name: the module's name on one device.
        index: which of the tensors that the module returns.
    """
    recorded = rank.parallel.outputs
    # In the parallel program the model may be inside another module.
    if name not in recorded and name:
        name = next((full_name for full_name in recorded if full_name.endswith(f".{name}")), name)
    outputs = [call[index] for call in recorded.get(name, []) if len(call) > index]
    if not outputs:
        return None
    first = outputs[0]
    if len(outputs) == 1:
        return first
    tensors = [output.local for output in outputs]
    # Micro-batches differ only in the number of samples, along dim 0.
    if any(not tensor.ndim or tensor.shape[1:] != first.local.shape[1:] for tensor in tensors):
        return None
    return LocalTensor(torch.cat(tensors), None, first.partial)


def _wrong(seen: Seen, outputs: list[LocalTensor | None], full: Tensor, rank: int, name: str, index: int) -> str:
    """Say what a rank's output is instead of a part of what it should be. Empty if it is right, or cannot be compared.

    Args:
        outputs: by rank, the module's output.
        full: the full output for the rank's samples.
        rank: whose output is looked at.
        name: the module's name on one device.
        index: which of the tensors that the module returns.
    """
    subject = seen.subject
    # Relative: two outputs this close are the same.
    alike = seen.reference.output_tolerance(name)
    own = outputs[rank]
    # One number is a loss: it belongs to no sample, and is compared elsewhere.
    if own is None or not full.is_floating_point() or full.numel() == 1:
        return ""
    right = full
    if own.shard is not None:
        place = place_of(own, full)
        if place is None:
            return ""
        right = place.of(full)
    elif own.local.shape != full.shape:
        shards = _shards_of_shape(subject, own.local, full, rank)
        if not shards:
            return ""
        # If none fits, the difference is measured from the first.
        right = shards[0]
        for shard in shards:
            if relative(own.local, shard, size_of(full)) <= alike:
                right = shard
                break
    scale = finite_size_of(full)
    if relative(own.local, right, scale) <= alike or _sums_to(subject, outputs, rank, right, scale, alike):
        return ""
    by_itself = None
    alone = seen.ranks[rank].alone
    if alone is not None:
        calls = alone.outputs.get(name, [])
        if len(calls) == 1 and len(calls[0]) > index:
            by_itself = calls[0][index].local

    # What other ranks should have stays unknown: another rank's output explains nothing.
    def others(other: int) -> Pair:
        output = outputs[other]
        if output is None:
            return None, None
        return output.local, None

    return describe_relation(own.local, right, scale, rank, others, by_itself, subject, alike)


def _sums_to(
    subject: Subject,
    outputs: list[LocalTensor | None],
    rank: int,
    expected: Tensor,
    scale: float,
    alike: float,
) -> bool:
    """Whether the outputs of an axis's ranks sum to what is expected: a later module makes that sum."""
    own = outputs[rank]
    assert own is not None
    for axis in subject.axes:
        may_be_partial = own.shard is None and axis not in subject.batch_axes
        if not own.partial and not may_be_partial:
            continue
        group = subject.group(rank, axis)
        summands = []
        for other in group:
            output = outputs[other]
            if output is not None and output.local.shape == own.local.shape:
                summands.append(output.local)
        if len(summands) < len(group):
            continue
        total = torch.stack(summands).sum(0)
        if relative(total, expected, scale) <= alike:
            return True
    return False


def _shards_of_shape(subject: Subject, local: Tensor, full: Tensor, rank: int) -> list[Tensor]:
    """This rank's shards of an output over each axis, as far as they have the shape of its plain tensor."""
    if local.ndim != full.ndim:
        return []
    sharded_dims = dims_of_other_size(local, full)
    if len(sharded_dims) != 1:
        return []
    dim = sharded_dims[0]
    length = local.shape[dim]
    shards = []
    for axis, size in subject.axes.items():
        if length * size == full.shape[dim]:
            start = subject.coordinates[rank][axis] * length
            shards.append(full.narrow(dim, start, length))
    return shards
