"""A trial of the whole model on the meta device, before ranks meet: what does each module get, and what mixes rows?

The model runs once with the full field, and once with each rank's rows. All runs are compared, operator by operator.
Dims whose lengths differ are rows. Each module learns from this how its input lies over the ranks. Between the modules
that have a style, an operator may treat each place by itself, or change the shape and keep each rank's rows together;
whatever else touches rows is refused, with the line of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mmm.parallel.cp.space.operators import CHANNELS_FIRST
from mmm.parallel.cp.space.record import Call, Record, run
from mmm.parallel.cp.space.split import note
from mmm.parallel.cp.space.strips import Bounds, strips
from mmm.parallel.plan import Field
from mmm.torch_private.operators import tree_leaves

VIEWS = "view _unsafe_view _reshape_alias"
# Rows stay with their places, or are all alike.
MOVES = """
permute transpose t unsqueeze squeeze expand stack clone detach alias copy_ _to_copy lift_fresh
zeros ones zeros_like ones_like full_like empty_like new_zeros new_ones new_empty zero_ fill_
"""
# Operators that take sizes as numbers: a rank's are its own.
SIZED = f"{VIEWS} expand zeros ones new_zeros new_ones new_empty split_with_sizes"
# Operators along the dims of their argument `dim` or `dims`, which must not be that of rows.
ALONG = """
cat split split_with_sizes slice select unbind sum mean amax amin max min argmax argmin var std logsumexp cumsum
_softmax _log_softmax roll flip topk sort glu index_select linalg_vector_norm
"""

# How the dims of a tensor that are split lie over the ranks.
Lies = dict[int, Bounds]


def read_fields(model: nn.Module, field: Field, ranks: int) -> list[Lies]:
    """Try a model with a field that is split, and note on its modules how their inputs lie. Needs no process group.

    Args:
        model: the full model.
        ranks: over how many ranks its rows are split.

    Returns:
        How each tensor of the output lies over the ranks.

    Raises:
        ConfigError: something mixes rows and has no style; the message has its name and line.
        LayoutError: a field has fewer rows than there are ranks.
    """
    full_run = run(model, field, Record(ranks))
    runs = [run(model, field, Record(ranks, rank, full_run)) for rank in range(ranks)]
    # A run that is longer or shorter has another call in the place of the output.
    for full, *own in zip(full_run, *runs, strict=False):
        by_tensor = _lies_of_tensors(full, own)
        problem = _problem(full, own, by_tensor, field)
        if problem:
            raise full.refused(problem)
        if isinstance(full.caller, nn.Module):
            note(full.caller, by_tensor[0])
    # Those of the last call, which stands for the output.
    return by_tensor


def _lies_of_tensors(full: Call, own: Sequence[Call]) -> list[Lies]:
    """How each tensor of a call lies over the ranks.

    Args:
        full: the call with the full field.
        own: the same with each rank's rows.

    Raises:
        ConfigError: it is not the same call on each rank.
    """
    # A forward may ask for the number of rows, and go another way.
    if any(_form(call) != _form(full) for call in own):
        raise full.refused("is not called in this place with a rank's rows")
    by_tensor = []
    for tensor, *pieces in zip(full.tensors, *[call.tensors for call in own], strict=True):
        lies = {}
        for dim, length in enumerate(tensor.shape):
            lengths = [piece.shape[dim] for piece in pieces]
            if lengths[0] == length:
                continue
            if sum(lengths) != length:
                raise full.refused(f"has {length} rows for the full field, and {lengths} on the ranks")
            edges = accumulate(lengths, initial=0)
            lies[dim] = tuple(pairwise(edges))
        by_tensor.append(lies)
    return by_tensor


def _problem(full: Call, own: Sequence[Call], by_tensor: Sequence[Lies], field: Field) -> str:
    """Why a call is refused; empty if it is not. Arguments as for `_lies_of_tensors`, and what it returns."""
    if full.caller is None:
        return _output_problem(by_tensor, full.tensors, field)
    if isinstance(full.caller, CHANNELS_FIRST) and min(by_tensor[0], default=2) < 2:
        return "gets rows as its channels: the plan's `space.dim` is another dim"
    if isinstance(full.caller, nn.Module):
        return ""
    # All rows, on each rank too, as `F.pad` slices where it is circular along columns.
    if full.name == "slice" and full.inputs[0].shape == full.output.shape and by_tensor[0] == by_tensor[1]:
        return ""
    # The output's tensors stand behind the inputs.
    inputs = len(full.inputs)
    problem = _operator_problem(full, by_tensor[:inputs], by_tensor[inputs:])
    if full.name not in SIZED.split() and any(_numbers(call) != _numbers(full) for call in own):
        problem = "takes a number that depends on the number of rows"
    if problem:
        problem += "; put it into a module of its own, and give that a style in the plan's `space.styles`"
    return problem


def _form(call: Call) -> tuple[str, list[int]]:
    """What is the same in all runs: the name, and how many dims tensors have."""
    return call.name, [tensor.ndim for tensor in call.tensors]


def _numbers(call: Call) -> str:
    """The numbers among the arguments. As text: a NaN that fills a mask is not equal to itself."""
    return repr([leaf for leaf in tree_leaves(call.arguments) if isinstance(leaf, int | float)])


def _output_problem(outputs: Sequence[Lies], tensors: Sequence[Tensor], field: Field) -> str:
    """Why the model's output does not go with its targets; empty if it does."""
    row_dims = 0 if field.targets is None else 1
    for lies, tensor in zip(outputs, tensors, strict=True):
        if len(lies) != row_dims:
            return (
                f"has rows along dims {[*lies]}, and the plan's `space.targets` is {field.targets}: which dim of the "
                f"targets is their rows, or None if they are no field"
            )
        for dim, have in lies.items():
            if have != strips(tensor.shape[dim], len(have)):
                return f"lies as {have} over the ranks, and not in strips"
    return ""


def _operator_problem(full: Call, inputs: Sequence[Lies], outputs: Sequence[Lies]) -> str:
    """Why an operator is refused that is in no module with a style; empty if it is not."""
    is_move = full.name in MOVES.split()
    if not any(inputs):
        return "makes rows that depend on their places" if any(outputs) and not is_move else ""
    # A rank's only row would be broadcast to a tensor that has all rows.
    if not all(outputs) and not full.name.startswith("new_"):
        return "may mix rows of the field"
    if is_move or torch.Tag.pointwise in full.caller.tags:
        return ""
    shape = full.inputs[0].shape
    if full.name in VIEWS.split() and len(inputs[0]) == len(outputs[0]) == 1:
        (dim,) = inputs[0]
        (new_dim,) = outputs[0]
        # What is before the rows stays so: each rank's rows stay together.
        if prod(shape[:dim]) == prod(full.output.shape[:new_dim]):
            return ""
    dims: Any = full.arguments.get("dim", full.arguments.get("dims"))
    if isinstance(dims, int):
        dims = [dims]
    # None or empty: along all.
    is_along = full.name in ALONG.split() and dims
    if full.name == "constant_pad_nd":
        is_along = True
        # From the last dim on: what is before it, and what is after it.
        dims = [-1 - place // 2 for place, length in enumerate(full.arguments["pad"]) if length]
    if is_along:
        rows = {dim for lies in inputs for dim in lies}
        if not rows & {dim % len(shape) for dim in dims}:
            return ""
    return "may mix rows of the field"
