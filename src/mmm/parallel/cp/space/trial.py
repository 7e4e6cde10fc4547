"""A trial of the whole model on the meta device, before ranks meet: what does each module get, and what mixes rows?

The model runs once with the full field, and once with each rank's rows. All runs are compared, operator by operator.
Dims whose lengths differ are rows. Each module learns from this how its input lies over the ranks. Between the modules
that have a style, an operator may treat each place by itself, or change the shape and keep each rank's rows together;
whatever else touches rows is refused, with the line of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmm.errors import ConfigError, LayoutError, UserError
from mmm.nn.init import class_name
from mmm.parallel.cp.space.operators import PROBLEMS, Style, is_local, style_of
from mmm.parallel.cp.space.pools import mean_of_rows
from mmm.parallel.cp.space.split import note
from mmm.parallel.cp.space.strips import Bounds, strips
from mmm.parallel.plan import Field
from mmm.parallel.user_line import user_line
from mmm.torch_private.operators import tree_leaves

Shape = tuple[int, ...]

# Samples of the trial. A batch norm takes no single one.
BATCH = 2
VIEWS = ("view", "_unsafe_view", "_reshape_alias")
# Rows stay with their places, or are all alike.
MOVES = (
    *("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "stack", "clone", "detach", "alias", "copy_"),
    *("_to_copy", "lift_fresh", "zeros", "ones", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "zero_", "fill_"),
)
# Operators that take sizes as numbers: a rank's are its own.
SIZED = (*VIEWS, "expand", "zeros", "ones", "new_zeros", "new_ones", "split_with_sizes")
# Operators along a dim, which must not be that of rows. The argument that names it has one of these names.
ALONG = (
    *("cat", "split", "split_with_sizes", "slice", "select", "unbind", "sum", "mean", "amax", "amin", "cumsum"),
    *("_softmax", "_log_softmax", "roll", "flip", "glu", "index_select", "linalg_vector_norm"),
)
DIM_NAMES = ("dim", "dims")


@dataclass
class Step:
    """An operator or a module that a run has called.

    Attributes:
        name: its name.
        line: the line of the program that calls it.
        inputs: shapes of the tensors that it got.
        outputs: shapes of those that it returned.
        scalars: the numbers among its arguments.
        module: the module, if it is one.
        dims: the dims that an operator goes along; None if it has no such argument.
    """

    name: str
    line: str
    inputs: list[Shape]
    outputs: list[Shape]
    scalars: list[Any]
    module: nn.Module | None = None
    dims: list[int] | None = None


def shapes_of(values: Any) -> list[Shape]:
    """The shapes of all tensors in a structure."""
    return [tuple(leaf.shape) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Trial(TorchDispatchMode):
    """One run of the model, which records its steps.

    Args:
        full: the steps of the run with the full field. None: this is it.
        rank: the rank whose rows the run has, of `ranks`.
    """

    def __init__(self, full: list[Step] | None = None, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.full = full
        self.rank = rank
        self.ranks = ranks
        # How many known modules this is inside of.
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.depth:
            return output
        scalars = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int | float)]
        step = Step(
            func.overloadpacket.__name__,
            user_line(reversed([*walk_stack(sys._getframe())])),
            shapes_of((args, kwargs)),
            shapes_of(output),
            scalars,
            dims=_dims_along(func, args, kwargs),
        )
        if torch.Tag.pointwise in func.tags:
            step.name = f"pointwise {step.name}"
        self.steps.append(step)
        return output

    def call(self, name: str, module: nn.Module, style: Style | None, *args: Any, **kwargs: Any) -> Any:
        """Stand for the forward of a module that has a style. With a rank's rows, only shapes are made."""
        line = user_line(reversed([*walk_stack(sys._getframe())]))
        title = f"{name} ({class_name(module)})"
        if self.full is None and style in PROBLEMS:
            problem = PROBLEMS[style](module, self.ranks, *args, **kwargs)
            if problem:
                raise ConfigError(f"cp_style space: {title} with {problem}")
        # What a module does inside is its style's.
        self.depth += 1
        if self.full is None:
            output = type(module).forward(module, *args, **kwargs)
        else:
            output = self._output_like(self.full[len(self.steps)], module, style, args[0])
        self.depth -= 1
        self.steps.append(Step(title, line, shapes_of((args, kwargs)), shapes_of(output), [], module))
        return output

    def _output_like(self, step: Step, module: nn.Module, style: Style | None, x: Tensor) -> Any:
        """The output of a module for this rank's rows.

        Args:
            step: the call with the full field.
            x: the module's input.
        """
        if step.module is not module:
            raise ConfigError(f"cp_style space: {step.name} is called with the full field where a rank's rows go on")
        full = step.inputs[0]
        outputs = []
        for shape in step.outputs:
            local = list(shape)
            for dim in rows_of(full, tuple(x.shape)):
                if style is mean_of_rows:
                    continue
                local[dim] = x.shape[dim]
                if shape[dim] != full[dim]:
                    try:
                        first, end = strips(shape[dim], self.ranks)[self.rank]
                    except LayoutError as error:
                        raise LayoutError(f"{error} ({step.name} makes it)") from None
                    local[dim] = end - first
            outputs.append(x.new_empty(local))
        # It returns its weights, or None, as well.
        if isinstance(module, nn.MultiheadAttention):
            weights = outputs[1] if len(outputs) > 1 else None
            return outputs[0], weights
        return outputs[0]


def _dims_along(func: Any, args: Any, kwargs: Any) -> list[int] | None:
    """The dims that an operator goes along; None if it has no such argument."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in DIM_NAMES:
            value = kwargs.get(argument.name, argument.default_value)
            if index < len(args):
                value = args[index]
            if value is None:
                return []
            return [value] if isinstance(value, int) else list(value)
    return None


def rows_of(full: Shape, local: Shape) -> list[int]:
    """The dims in which a rank's tensor is not as long as the full one."""
    return [dim for dim in range(len(full)) if full[dim] != local[dim]]


def read_fields(model: nn.Module, field: Field, ranks: Sequence[int]) -> None:
    """Try a model with a field that is split, and note on its modules how their inputs lie. Needs no process group.

    Args:
        model: the full model.
        ranks: over how many ranks each dim of space is split, the first dim first.

    Raises:
        ConfigError: something mixes rows and has no style; the message has its name and line.
        LayoutError: a field has fewer rows than there are ranks.
    """
    for index, size in enumerate(ranks):
        full = _run(model, field, index, Trial(ranks=size))
        runs = [_run(model, field, index, Trial(full, rank, size)) for rank in range(size)]
        if any(len(run) != len(full) for run in runs):
            raise ConfigError("cp_style space: forward goes another way with a rank's rows than with the full field")
        for steps in zip(full, *runs, strict=True):
            if steps[0] is full[-1]:
                _check_output(steps[0], steps[1:], field)
            else:
                _compare(steps[0], steps[1:], index)


def _check_output(full: Step, locals_: Sequence[Step], field: Field) -> None:
    """Raises ConfigError if the model's output does not lie over the ranks as its targets do."""
    split = [_bounds(shape, [step.outputs[place] for step in locals_]) for place, shape in enumerate(full.outputs)]
    for shape, bounds in zip(full.outputs, split, strict=True):
        if field.targets is None and bounds:
            raise ConfigError(
                f"cp_style space: the output {shape} is a field, and the plan's `space.targets` is None: it takes the "
                f"dim of the targets' rows"
            )
        if field.targets is not None:
            if len(bounds) != 1:
                raise ConfigError(
                    f"cp_style space: the output {shape} has no rows that are split, and the plan's `space.targets` "
                    f"is {field.targets}: None says that every rank computes all of it"
                )
            for dim, have in bounds.items():
                if have != strips(shape[dim], len(locals_)):
                    raise ConfigError(f"cp_style space: the {shape[dim]} rows of the output lie as {have} on the ranks")


def _run(model: nn.Module, field: Field, index: int, trial: Trial) -> list[Step]:
    """Run forward on the meta device, and return the steps."""
    state = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    inputs = torch.empty(BATCH, *field.shape, dtype=dtypes[0] if dtypes else None, device="meta")
    try:
        if trial.full is not None:
            inputs = _rows(inputs, field.dim + index, trial)
            for name, dim in field.parameters.items():
                state[name] = _rows(state[name], dim + index, trial)
        with _known(model, field, trial), trial, torch.no_grad():
            output = torch.func.functional_call(model, state, (inputs,))
        trial.steps.append(Step("the output", "", [], shapes_of(output), []))
    except UserError:
        raise
    # A user's forward may raise anything.
    except Exception as error:
        line = user_line(walk_tb(error.__traceback__))
        whose = "the full field" if trial.full is None else "a rank's rows"
        raise ConfigError(
            f"cp_style space: forward fails with {whose}{line}: {type(error).__name__}: {error}; a parameter or a "
            f"buffer that is a field belongs into the plan's `space.parameters`"
        ) from error
    return trial.steps


def _rows(tensor: Tensor, dim: int, trial: Trial) -> Tensor:
    """The rows of the rank that a trial is for."""
    first, end = strips(tensor.shape[dim], trial.ranks)[trial.rank]
    return tensor.narrow(dim, first, end - first)


@contextmanager
def _known(model: nn.Module, field: Field, trial: Trial) -> Iterator[None]:
    """Inside, the forward of each module that has a style, or is local, is the trial's."""
    replaced = []
    try:
        for name, module in model.named_modules():
            style = style_of(module, field.styles)
            if style is not None or is_local(module):
                replaced.append((module, module.__dict__.get("forward")))
                module.forward = partial(trial.call, name, module, style)
        yield
    finally:
        for module, forward in replaced:
            del module.forward
            if forward is not None:
                module.forward = forward


def _compare(full: Step, locals_: Sequence[Step], index: int) -> None:
    """Note how the input of a module lies; refuse an operator that mixes rows.

    Raises:
        ConfigError: it does.
    """
    problem = _step_problem(full, locals_, index)
    if problem:
        raise ConfigError(
            f"cp_style space: {full.name}{full.line} {problem}; put it into a module of its own, and give that a "
            f"style in the plan's `space.styles`"
        )


def _step_problem(full: Step, locals_: Sequence[Step], index: int) -> str:
    """Why a step is refused; empty if it is not. If it is a module, note how its input lies."""
    tensors = len(full.inputs) + len(full.outputs)
    if any(step.name != full.name or len(step.inputs) + len(step.outputs) != tensors for step in locals_):
        return "is not called in this place with a rank's rows"
    inputs = [_bounds(shape, [step.inputs[place] for step in locals_]) for place, shape in enumerate(full.inputs)]
    outputs = [_bounds(shape, [step.outputs[place] for step in locals_]) for place, shape in enumerate(full.outputs)]
    for shape, split in zip((*full.inputs, *full.outputs), (*inputs, *outputs), strict=True):
        for dim, have in split.items():
            rows = have[-1][1]
            if rows != shape[dim]:
                return f"has {shape[dim]} rows for the full field, and {rows} on the ranks together"
    if full.module is None:
        return _problem(full, locals_, inputs, outputs)
    note(full.module, inputs[0], index)
    return ""


def _bounds(full: Shape, locals_: Sequence[Shape]) -> dict[int, Bounds]:
    """How the dims of a tensor that are split lie over the ranks."""
    split: dict[int, Bounds] = {}
    for dim in rows_of(full, locals_[0]):
        bounds = []
        end = 0
        for local in locals_:
            bounds.append((end, end + local[dim]))
            end += local[dim]
        split[dim] = tuple(bounds)
    return split


def _problem(
    full: Step,
    locals_: Sequence[Step],
    inputs: Sequence[Mapping[int, Bounds]],
    outputs: Sequence[Mapping[int, Bounds]],
) -> str:
    """Why an operator between modules is refused; empty if it is not."""
    has_rows = any(inputs)
    if full.name not in SIZED and any(step.scalars != full.scalars for step in locals_):
        return "takes a number that depends on the number of rows"
    if not has_rows:
        if any(outputs) and full.name not in MOVES:
            return "makes rows that depend on their places"
        return ""
    if full.name.startswith("pointwise ") or full.name in MOVES:
        return ""
    if full.name in VIEWS:
        return _view_problem(full, inputs[0], outputs[0])
    if full.name in ALONG and full.dims is not None:
        rows = set()
        for shape, bounds in zip(full.inputs, inputs, strict=True):
            rows |= {dim - len(shape) for dim in bounds}
        ndim = len(full.inputs[0])
        dims = {dim % ndim - ndim for dim in full.dims}
        if dims and not dims & rows:
            return ""
    return "may mix rows of the field"


def _view_problem(full: Step, inputs: Mapping[int, Bounds], outputs: Mapping[int, Bounds]) -> str:
    """Why a change of shape is refused: the rows of a rank would not lie together, or not in the order of the field."""
    if len(inputs) == 1 and len(outputs) == 1:
        (dim,) = inputs
        (new_dim,) = outputs
        if prod(full.inputs[0][:dim]) == prod(full.outputs[0][:new_dim]):
            return ""
    return f"of {full.inputs[0]} to {full.outputs[0]} puts rows of several ranks together, or takes them apart"
