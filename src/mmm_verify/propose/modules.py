"""Finds modules that can be sharded as a whole: a rank's parameters give a part of the sum that the module returns.

This is for what is not a pair of matrices: experts kept in one parameter of three dims, attention with a parameter for
each head, `nn.MultiheadAttention`. One parameter is taken to be sharded along one dim. The others' gradients, with all
but a rank's part of it set to zero, show which part of each of them the rank needs::

    down        (experts, dim, [ × × · · ])          rank 0's part; the rest is zero
      │ backward
      ▼
    gate and up (experts, [ × × · · × × · · ], dim)   two sections, each in two shards

Then the module is called with each rank's parts, and the outputs have to sum to what it returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmm_verify.propose.channels import LEAST, Sections, channels_of, divided_dim
from mmm_verify.propose.trace import Call, Trace, is_matrix, parent_of
from mmm_verify.propose.trial import (
    TOLERANCE,
    Fix,
    Group,
    Problem,
    best_fixes,
    changed,
    integers,
    near,
    off,
    place_of,
    subsets,
)
from mmm_verify.torch_private import BatchNorm, Convolution, tensors_in

# The share of all parameters from which on a parameter is sharded.
LARGE = 0.02
# Modules that are not tried for a parameter of theirs.
NOT_AS_A_WHOLE = (nn.Embedding, Convolution, BatchNorm, nn.MultiheadAttention)


@dataclass
class ShardedModule:
    """A module that is sharded as a whole.

    Attributes:
        path: its path.
        rows: the parameter whose parts give the summands of the output; empty for nn.MultiheadAttention.
        dims: by parameter, the dim that is divided and its sections. All others are replicated.
        once: parameters that every rank would add to the sum.
        fixes: integer attributes that must be divided by the size of tp.
        refused: why it cannot be sharded; empty if it can.
    """

    path: str
    rows: str = ""
    dims: dict[str, tuple[int, Sections]] = field(default_factory=dict)
    once: list[str] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    refused: str = ""


def find_modules(
    trace: Trace, groups: Sequence[Group], refused: Sequence[Group], tied: Mapping[str, str], n_ranks: int
) -> list[ShardedModule]:
    """Find the modules that can be sharded as a whole, besides the groups that are sharded.

    Args:
        groups: the groups that are sharded.
        refused: groups that are not: the modules around them are tried.
        tied: the parameters that have several names.
    """
    model = trace.model
    taken: set[str] = set()
    for group in groups:
        taken |= set(group.members)
    by_path: dict[str, ShardedModule] = {}
    for path, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and path in trace.calls:
            by_path[path] = ShardedModule(path, refused=_why_not_by_heads(module, n_ranks))
    for path, rows in _candidates(trace, refused):
        prefix = f"{path}."
        sharded = [*taken, *by_path]
        # The module, or something in it, is sharded already.
        if any(other == path or other.startswith(prefix) for other in sharded):
            continue
        module = model.get_submodule(path)
        # Full names, such as "layers.0.experts.down".
        parameters = module.named_parameters(prefix=path, remove_duplicate=False)
        ties = [name for name, _ in parameters if name in tied]
        if ties:
            first = ties[0]
            by_path[path] = ShardedModule(path, refused=f"{first} is {tied[first]} too")
            continue
        by_path[path] = _first_that_fits(trace, path, rows, n_ranks)
    return list(by_path.values())


def _why_not_by_heads(module: nn.MultiheadAttention, n_ranks: int) -> str:
    """Why nn.MultiheadAttention cannot be sharded by heads; empty if it can."""
    if module.num_heads % n_ranks:
        return f"it has {module.num_heads} heads, which do not divide by {n_ranks}"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "its keys and values have widths of their own, bias_k or add_zero_attn"
    return ""


def _candidates(trace: Trace, refused: Sequence[Group]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Modules to try, each with the parameters that may be sharded first: their names, and the dim."""
    model = trace.model
    least = LARGE * sum(parameter.numel() for parameter in model.parameters())
    candidates: dict[str, list[tuple[str, int]]] = {}
    for path, calls in trace.calls.items():
        module = model.get_submodule(path)
        # "" is the path of the model itself.
        if not path or isinstance(module, NOT_AS_A_WHOLE) or is_matrix(module):
            continue
        own = dict(module.named_parameters(recurse=False))
        # The last parameter is the likeliest to be multiplied last, along its last dim.
        large = []
        for name, parameter in reversed(own.items()):
            if parameter.ndim == 3 and parameter.numel() >= least:
                large.append(name)
        around = path
        # Experts' matrices may be modules of one parameter each: the module around them has all of them.
        if len(own) == 1:
            around = parent_of(path)
            while around and around not in trace.calls:
                around = parent_of(around)
        if not large or not calls or not around:
            continue
        prefix = path.removeprefix(around).lstrip(".")
        rows = []
        for name in large:
            full_name = f"{prefix}.{name}".lstrip(".")
            # (experts, out, in), or (experts, in, out)
            rows += [(full_name, 2), (full_name, 1)]
        # Later calls are nearer to the output.
        candidates[around] = rows + candidates.get(around, [])
    yield from candidates.items()
    for group in refused:
        if not group.around or len(trace.calls[group.around]) != 1:
            continue
        rows = []
        for path in group.consumers:
            if isinstance(model.get_submodule(path), nn.Linear):
                inner_path = path.removeprefix(f"{group.around}.")
                # (out, in)
                rows.append((f"{inner_path}.weight", 1))
        # With several matrices, several tensors would have to be summed.
        if len(rows) == 1 and len(group.consumers) == 1:
            yield group.around, rows


def _first_that_fits(trace: Trace, path: str, rows: Sequence[tuple[str, int]], n_ranks: int) -> ShardedModule:
    """The module, sharded along the first of the dims to try that it can be sharded along."""
    first = None
    for name, dim in rows:
        sharded = _try(trace, path, name, dim, n_ranks)
        if not sharded.refused:
            return sharded
        first = first or sharded
    assert first is not None
    return first


def _try(trace: Trace, path: str, rows: str, dim: int, n_ranks: int) -> ShardedModule:
    """Shard a parameter along a dim, the others as their gradients say, and compare the sum with the full output."""
    result = ShardedModule(path, rows)
    model = trace.model
    module = model.get_submodule(path)
    call = trace.calls[path][0]
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    value = parameters[rows]
    width = value.shape[dim]
    if width % n_ranks:
        result.refused = f"{path}.{rows} has {width} channels, which do not divide by {n_ranks}"
        return result
    others = {name: parameter for name, parameter in parameters.items() if name != rows}
    if not others:
        result.refused = f"{path} has no other parameter that could be divided with {rows}"
        return result
    try:
        full = _outputs(module, call, parameters)
        zeros = torch.zeros_like(value)
        # Some gradients do not pass through the sharded parameter, such as that of a bias added after it.
        after, _ = _gradients(module, call, rows, zeros, others)
        by_rank = []
        own_width = width // n_ranks
        for rank in range(n_ranks):
            first = rank * own_width
            own = value.narrow(dim, first, own_width)
            masked = zeros.clone()
            # narrow() is a view: this writes the rank's part into it.
            masked.narrow(dim, first, own_width).copy_(own)
            of_rank, scale = _gradients(module, call, rows, masked, others)
            by_rank.append(_minus(of_rank, after, scale))
    # The user's code may raise anything.
    except Exception as error:
        result.refused = place_of(error).text
        return result
    result.dims[rows] = (dim, ((width, n_ranks),))
    for name in others:
        gradients_by_rank = [gradients[name] for gradients in by_rank]
        entry = divided_dim(gradients_by_rank, n_ranks)
        if entry is not None:
            result.dims[name] = entry
        elif after[name] is not None:
            result.once.append(name)
    if len(result.dims) == 1:
        result.refused = f"no other parameter of {path} is divided with {rows}"
        return result
    # What the module may count: these numbers as integer attributes would have to be divided.
    counts = {width}
    for name, (_, sections) in result.dims.items():
        counts |= {section for section, _ in sections}
        counts |= set(parameters[name].shape)
    inside = {parent_of(f"{path}.{name}") for name in result.dims} - {path}
    candidates = integers(model, path, counts, inside, n_ranks)
    try_fixes = partial(_try_fixes, trace, result, parameters, full, n_ranks)
    result.fixes, result.refused = best_fixes(subsets(candidates, ()), try_fixes)
    return result


def _outputs(module: nn.Module, call: Call, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that a module returns with these parameters, called as in the trace."""
    args, kwargs = call.arguments
    with torch.no_grad():
        return tensors_in(functional_call(module, dict(parameters), args, kwargs))


def _gradients(
    module: nn.Module, call: Call, rows: str, value: Tensor, others: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor | None], float]:
    """The gradients of the other parameters with `value` in place of one.

    Returns:
        By name, the gradient of a random sum of the module's output, or None; and the size of the largest one.
    """
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in others.items()}
    args, kwargs = call.arguments
    with torch.enable_grad():
        returned = functional_call(module, {**leaves, rows: value}, args, kwargs)
    output = _first_floats(tensors_in(returned))
    # The weights of the sum, the same in every call.
    random = torch.Generator().manual_seed(0)
    seed = torch.randn(output.shape, generator=random, dtype=torch.float64)
    seed = seed.to(output.dtype)
    gradients: list[Tensor | None] = [None] * len(leaves)
    if output.requires_grad:
        inputs = list(leaves.values())
        gradients = list(torch.autograd.grad([output], inputs, [seed], allow_unused=True))
    by_name: dict[str, Tensor | None] = {}
    largest = 0.0
    for name, gradient in zip(leaves, gradients, strict=True):
        by_name[name] = None
        if gradient is not None and bool(gradient.any()):
            by_name[name] = gradient
            size = float(gradient.abs().max())
            largest = max(largest, size)
    return by_name, largest


def _minus(
    gradients: Mapping[str, Tensor | None], after: Mapping[str, Tensor | None], scale: float
) -> dict[str, Tensor | None]:
    """Gradients without what does not pass the parameter that is sharded. What is only rounding becomes zero."""
    result: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        other = after[name]
        if gradient is not None and other is not None:
            difference = gradient - other
            gradient = difference * (difference.abs() > LEAST * scale)
        result[name] = gradient
    return result


def _first_floats(tensors: Sequence[Tensor]) -> Tensor:
    """The first tensor of floats: the output that is summed over the ranks."""
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def _try_fixes(
    trace: Trace,
    sharded: ShardedModule,
    parameters: Mapping[str, Tensor],
    full: Sequence[Tensor],
    n_ranks: int,
    fixes: Sequence[Fix],
) -> float | Problem:
    """Compare the sum over the ranks with the full result: how far it is off, or why it is wrong."""
    model = trace.model
    module = model.get_submodule(sharded.path)
    call = trace.calls[sharded.path][0]
    values = {}
    for path, name in fixes:
        count = getattr(model.get_submodule(path), name)
        values[path, name] = count // n_ranks
    full_first = _first_floats(full)
    total: Tensor | int = 0
    with changed(model, values):
        for rank in range(n_ranks):
            own = dict(parameters)
            for name, (dim, sections) in sharded.dims.items():
                channels = torch.tensor(channels_of(sections, rank, n_ranks))
                own[name] = parameters[name].index_select(dim, channels)
            # The sum over the ranks then has it once.
            for name in sharded.once:
                own[name] = parameters[name] / n_ranks
            try:
                outputs = _outputs(module, call, own)
            # Shapes may not fit, for example.
            except Exception as error:
                return place_of(error)
            first = _first_floats(outputs)
            total = total + first
            for tensor, of_rank, in_full in zip(call.returned, outputs, full, strict=False):
                # The first tensor of floats is summed instead.
                if of_rank is first or in_full is full_first:
                    continue
                if trace.is_used(call, tensor) and not near(of_rank, in_full):
                    return Problem(f"{sharded.path} also returns a tensor that differs by rank, and others take it")
    error_of_sum = off(torch.as_tensor(total), full_first)
    if error_of_sum <= TOLERANCE:
        return error_of_sum
    return Problem(f"the outputs of {sharded.path} on all ranks, summed, are not its output with all channels")
