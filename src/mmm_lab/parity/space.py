"""Anyone's model with a field whose rows cp splits, as `mmm_verify` compares it: ``mmm verify MODEL --space rows=2``.

Which dims are rows is found: a step runs once on one device, and the model is then tried with each dim of its input
split. On the ranks, the model computes with a rank's rows of the field. Its output is made whole again, so that any
step will do::

    full field ──► own rows ──► the model, by `parallelize` ──► own rows ──► full output ──► loss
                                takes rows of other ranks                    the same on each rank of cp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError, UserError
from mmm.layout import Layout
from mmm.parallel.cp.space.checks import check_space
from mmm.parallel.cp.space.split import NOTES, Split
from mmm.parallel.cp.space.strips import whole
from mmm.parallel.cp.space.take import Axis
from mmm.parallel.cp.space.trial import Lies, read_fields
from mmm.parallel.initial_weights import materialize
from mmm.parallel.mesh import build_mesh
from mmm.parallel.plan import Field, Plan
from mmm.parallel.techniques import parallelize
from mmm.parallel.values import constructed_values
from mmm.runtime.device import Precision
from mmm.torch_private.operators import TorchDispatchMode, tree_leaves
from mmm_verify.dtypes import by_default
from mmm_verify.plain import make_batch, make_model
from mmm_verify.propose.trace import trace
from mmm_verify.ranks.ranks import fork_one
from mmm_verify.subject import Subject, parse_axes
from mmm_verify.torch_private import tensors_in


class Rows(NamedTuple):
    """Where the rows of a model's fields are.

    Attributes:
        field: as a plan says it.
        output: how the dims of the output lie over the ranks.
    """

    field: Field
    output: Lies


def split_subject(subject: Subject, space: str, timeout: float) -> Subject:
    """Split the model's field over ranks, which are added to the mesh as the axis cp. Prints where the rows are.

    Args:
        space: value of ``--space``: ``rows=2``.
        timeout: seconds that finding the rows may take.

    Raises:
        UserError: the value cannot be read, the mesh has another axis than data, or no rows are found.
    """
    name, _, size = space.partition("=")
    if name != "rows" or not size.isdecimal() or size in ("0", "1"):
        raise ConfigError(f"--space {space}: write rows=2, or another number of ranks; only rows are split")
    if subject.n_parts < subject.n_ranks:
        raise ConfigError(f"--mesh {subject.layout} with --space: only axes of data go with it, such as --mesh dp2")
    axes = parse_axes({**subject.axes, "cp": int(size)})
    layout = Layout(dp_shard=subject.n_parts, cp=axes["cp"])
    rows = fork_one("finding the rows", find_rows, subject, layout.cp, timeout=timeout)
    where = f"dim {rows.field.dim} of the input"
    for dim in rows.output:
        where += f", dim {dim} of the output"
    if rows.field.targets is not None:
        where += f", dim {rows.field.targets} of its targets"
    print(f"found\n  rows          {where}\n  plan          space={rows.field}\n", flush=True)
    return replace(subject, axes=axes, parallelize_fn=partial(split_rows, rows, layout, subject.dtype))


def split_rows(rows: Rows, layout: Layout, dtype: torch.dtype, model: nn.Module, mesh: Any) -> nn.Module:
    """Have the model compute with this rank's rows; it still takes and returns full fields. A collective.

    Args:
        mesh: the mesh by other names than `parallelize` has for its axes.
    """
    own_mesh = build_mesh(layout, "cpu")
    plan = Plan(tensor={}, fsdp_units=(), space=rows.field)
    model = parallelize(model, own_mesh, plan, Precision("", dtype, dtype), cp_style="space")
    materialize(model, torch.device("cpu"), 0, values=constructed_values(model))
    group = own_mesh["cp"].get_group()
    split = Split(group)
    forward = model.forward

    def forward_whole(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        own = split.own(x, rows.field.dim)
        y: Tensor = forward(own)
        for dim, have in rows.output.items():
            y = Axis(dim, have, group.rank(), group).take(y, whole(have))
        if y.requires_grad:
            # Each rank has the loss of the whole output, and gradients are summed over all ranks.
            y.register_hook(lambda gradient: gradient / layout.ranks)
        return y

    model.forward = forward_whole  # type: ignore[method-assign]
    return model


def find_rows(subject: Subject, size: int) -> Rows:
    """Find the rows of a model's input, output and targets, and its parameters that are fields.

    Args:
        size: over how many ranks they are to be split.

    Raises:
        UserError: a step calls the model with more than a field, or of several shapes, or no dim can be split.
    """
    # As it is trained: dropout is refused.
    model = make_model(subject, None, dropout=True, evaluating=False)
    batch = make_batch(subject)
    with by_default(subject.dtype):
        calls = trace(model, lambda model: subject.step(model, batch, None)).calls.get("", [])
    shapes = {tuple(tensor.shape) for call in calls for tensor in tensors_in(call.arguments)}
    if len(shapes) != 1 or any(len(tree_leaves(call.arguments)) > 1 for call in calls):
        raise ConfigError(f"--space: a step has to call the model with one tensor, of one shape; here {sorted(shapes)}")
    (shape,) = shapes
    check_space(model, Plan({}, (), space=Field(shape[1:])))
    refusals: dict[int, UserError] = {}
    # Outputs are fields, or they are not.
    for dim, targets in product(range(1, len(shape)), (2, None)):
        try:
            rows = _try(model, Field(shape[1:], dim, targets=targets), size)
        except UserError as error:
            refusals.setdefault(dim, error)
            continue
        dim_of_targets = _targets_dim(rows, calls[0].returned[0], batch)
        return Rows(replace(rows.field, targets=dim_of_targets), rows.output)
    # The rows of (batch, channels, rows, …).
    dim = min(2, len(refusals))
    raise ConfigError(f"--space: dim {dim} of the input {shape} cannot be split: {refusals.get(dim)}")


def _targets_dim(rows: Rows, output: Tensor, batch: Any) -> int | None:
    """Which dim of the last tensor of a batch, its targets, is their rows; None if the output has none."""
    targets = tensors_in(batch)[-1]
    for dim in rows.output:
        # Labels lack the dim of classes, which is before the rows or behind them.
        before = dim - output.ndim + targets.ndim
        return before or dim
    return None


def _try(model: nn.Module, field: Field, size: int) -> Rows:
    """Try a model with a field, and with more and more of its parameters as fields. Raises UserError."""
    for module in model.modules():
        # Of a trial before.
        module.__dict__.pop(NOTES, None)
    operands = Operands()
    try:
        with operands:
            (output,) = read_fields(model, field, size)
        return Rows(field, output)
    except UserError:
        full_operands = _full_operands(model, operands.tensors)
        parameters = {**full_operands, **field.parameters}
        # None is left.
        if parameters == field.parameters:
            raise
    return _try(model, replace(field, parameters=parameters), size)


class Operands(TorchDispatchMode):
    """Keeps the tensors that the last operator got: the one that has failed, if one has."""

    tensors: Sequence[Tensor] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors = tensors_in(args)
        return func(*args, **(kwargs or {}))


def _full_operands(model: nn.Module, operands: Sequence[Tensor]) -> dict[str, int]:
    """The parameters and buffers among an operator's tensors that have other rows than another tensor, and which dim
    these are."""
    dims = {}
    for full, own in permutations(operands, 2):
        # From the last dim on, as they broadcast.
        lengths = zip(reversed(full.shape), reversed(own.shape), strict=False)
        for place, pair in enumerate(lengths, 1):
            if len({*pair, 1}) == 3:
                dims[full.shape] = full.ndim - place
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: dims[tensor.shape] for name, tensor in named if tensor.shape in dims}
