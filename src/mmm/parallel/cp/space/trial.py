"""A trial of the whole model on the meta device, before ranks meet: what does each module get, and what mixes rows?

The model runs once with the full field, and once with each rank's rows. All runs are compared, operator by operator.
Dims whose lengths differ are rows. Each module learns from this how its input lies over the ranks. Between the modules
that have a style, an operator may treat each place by itself, or change the shape and keep each rank's rows together;
whatever else touches rows is refused, with the line of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from math import prod
from traceback import walk_stack, walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmm.errors import ConfigError, LayoutError, UserError
from mmm.nn.init import class_name
from mmm.parallel.cp.space.operators import CHANNELS_FIRST, PROBLEMS, Style, is_local, style_of
from mmm.parallel.cp.space.pools import mean_of_rows
from mmm.parallel.cp.space.split import note
from mmm.parallel.cp.space.strips import Bounds, own_rows, strips
from mmm.parallel.plan import Field
from mmm.parallel.user_line import user_line
from mmm.torch_private.operators import tree_leaves, tree_map_only

# Samples of the trial. A batch norm takes no single one.
BATCH = 2
VIEWS = ("view", "_unsafe_view", "_reshape_alias")
# Rows stay with their places, or are all alike.
MOVES = """
permute transpose t unsqueeze squeeze expand stack clone detach alias copy_ _to_copy lift_fresh
zeros ones zeros_like ones_like full_like empty_like new_zeros new_ones zero_ fill_
"""
# Operators that take sizes as numbers: a rank's are its own.
SIZED = (*VIEWS, "expand", "zeros", "ones", "new_zeros", "new_ones", "split_with_sizes")
# Operators along the dims of their argument `dim` or `dims`, which must not be that of rows.
ALONG = """
cat split split_with_sizes slice select unbind sum mean amax amin cumsum _softmax _log_softmax roll flip
index_select linalg_vector_norm
"""
SPACE = "cp_style space:"

# How the dims of a tensor that are split lie over the ranks.
Lies = dict[int, Bounds]


class Call(NamedTuple):
    """An operator, or a module that has a style, that a run has called.

    Attributes:
        name: its name.
        line: the line of the program that calls it.
        inputs: the tensors that it got, on the meta device.
        output: what it returned.
        scalars: the numbers among its arguments.
        dims: the dims that an operator goes along; None if it has no such argument.
        pointwise: whether it treats each element by itself.
        module: the module, if it is one.
    """

    name: str
    line: str
    inputs: list[Tensor]
    output: Any
    scalars: Sequence[Any] = ()
    dims: Any = None
    pointwise: bool = False
    module: nn.Module | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return self.inputs + _tensors(self.output)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _line() -> str:
    """The line of the program that is running."""
    return user_line(reversed([*walk_stack(sys._getframe())]))


class Trial(TorchDispatchMode):
    """One run of the model, which records its calls.

    Args:
        ranks: the number of ranks.
        rank: the rank whose rows the run has. None: it has the full field.
        full: the calls of the run with the full field.
    """

    def __init__(self, ranks: int, rank: int | None = None, full: Sequence[Call] = ()) -> None:
        super().__init__()
        self.ranks = ranks
        self.rank = rank
        self.full = full
        self.calls: list[Call] = []
        # How many modules with a style this is inside of: what they do there is their style's.
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.depth == 0:
            leaves = tree_leaves((args, kwargs))
            scalars = [leaf for leaf in leaves if isinstance(leaf, int | float)]
            # Without its argument, an operator goes along its default: `amax`, `roll` and norms along all dims.
            arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
            arguments.update(zip(arguments, args, strict=False))
            arguments.update(kwargs or {})
            dims = arguments.get("dim", arguments.get("dims"))
            call = Call(
                func.overloadpacket.__name__,
                _line(),
                _tensors((args, kwargs)),
                output,
                scalars,
                [dims] if isinstance(dims, int) else dims,
                torch.Tag.pointwise in func.tags,
            )
            self.calls.append(call)
        return output

    def call(self, name: str, module: nn.Module, style: Style | None, *args: Any, **kwargs: Any) -> Any:
        """Stand for the forward of a module that has a style. With a rank's rows, only shapes are made."""
        # What a module does inside is its style's.
        if self.depth:
            return type(module).forward(module, *args, **kwargs)
        title = f"{name} ({class_name(module)})"
        line = _line()
        if self.rank is None and style in PROBLEMS:
            problem = PROBLEMS[style](module, self.ranks, *args, **kwargs)
            if problem:
                raise ConfigError(f"{SPACE} {title}{line} with {problem}")
        self.depth += 1
        # What treats each place by itself does so with a rank's rows, and fails if these are its channels.
        if self.rank is None or style is None:
            output = type(module).forward(module, *args, **kwargs)
        else:
            full = self.full[len(self.calls)]
            if full.module is not module:
                raise ConfigError(f"{SPACE} {title}{line} is not called in this place with the full field")
            local = partial(self._local, full, args[0], style)
            output = tree_map_only(Tensor, local, full.output)
        self.depth -= 1
        self.calls.append(Call(title, line, _tensors((args, kwargs)), output, module=module))
        return output

    def _local(self, full: Call, x: Tensor, style: Style | None, output: Tensor) -> Tensor:
        """The output of a module for a rank's rows x, without values.

        Args:
            full: the call with the full field, and `output` what it returned.
        """
        shape = list(output.shape)
        length_before = full.inputs[0].shape
        for dim in range(x.ndim):
            is_whole = x.shape[dim] == length_before[dim]
            if is_whole or style is mean_of_rows:
                continue
            shape[dim] = x.shape[dim]
            if output.shape[dim] != length_before[dim]:
                assert self.rank is not None
                try:
                    first, end = strips(output.shape[dim], self.ranks)[self.rank]
                except LayoutError as error:
                    raise LayoutError(f"{error} ({full.name}{full.line} makes it)") from None
                shape[dim] = end - first
        return x.new_empty(shape)


def read_fields(model: nn.Module, field: Field, ranks: Sequence[int]) -> list[Lies]:
    """Try a model with a field that is split, and note on its modules how their inputs lie. Needs no process group.

    Args:
        model: the full model.
        ranks: over how many ranks each dim of space is split, the first dim first.

    Returns:
        How each tensor of the output lies over the ranks.

    Raises:
        ConfigError: something mixes rows and has no style; the message has its name and line.
        LayoutError: a field has fewer rows than there are ranks.
    """
    outputs: dict[int, Lies] = {}
    for index, size in enumerate(ranks):
        full = _run(model, field, index, Trial(size))
        runs = [_run(model, field, index, Trial(size, rank, full)) for rank in range(size)]
        if any(len(run) != len(full) for run in runs):
            raise ConfigError(f"{SPACE} forward goes another way with a rank's rows than with the full field")
        for call, *locals_ in zip(full, *runs, strict=True):
            problem = _problem(call, locals_, index, field)
            if problem:
                raise ConfigError(f"{SPACE} {call.name}{call.line} {problem}")
        last = [run[-1].tensors for run in (full, *runs)]
        for place, (tensor, *pieces) in enumerate(zip(*last, strict=True)):
            outputs.setdefault(place, {}).update(_lies(tensor, pieces))
    return list(outputs.values())


def _run(model: nn.Module, field: Field, index: int, trial: Trial) -> list[Call]:
    """Run forward on the meta device, and return the calls. The last one stands for the output."""
    # The model itself may be on any device, and stays as it is.
    state = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    inputs = torch.empty(BATCH, *field.shape, dtype=dtypes[0] if dtypes else None, device="meta")
    if trial.rank is not None:
        inputs = own_rows(inputs, trial.ranks, trial.rank, field.dim + index)
        for name, dim in field.parameters.items():
            state[name] = own_rows(state[name], trial.ranks, trial.rank, dim + index)
    try:
        with _known(model, field, trial), trial, torch.no_grad():
            output = torch.func.functional_call(model, state, (inputs,))
    except UserError:
        raise
    # A user's forward may raise anything.
    except Exception as error:
        line = user_line(walk_tb(error.__traceback__))
        whose = "the full field" if trial.rank is None else "a rank's rows"
        raise ConfigError(
            f"{SPACE} forward fails with {whose}{line}: {type(error).__name__}: {error}; a parameter or a buffer that "
            f"is a field belongs into the plan's `space.parameters`"
        ) from error
    return [*trial.calls, Call("the output", "", [], output)]


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


def _problem(full: Call, locals_: Sequence[Call], index: int, field: Field) -> str:
    """Why a call is refused; empty if it is not. If it is of a module, note how its input lies.

    Args:
        full: the call with the full field.
        locals_: the same with each rank's rows.
        index: which dim of space is split.
    """
    tensors = full.tensors
    # A forward may ask for the number of rows, and go another way.
    if any(call.name != full.name or len(call.tensors) != len(tensors) for call in locals_):
        return "is not called in this place with a rank's rows"
    by_tensor = []
    for tensor, *pieces in zip(tensors, *[call.tensors for call in locals_], strict=True):
        lies = _lies(tensor, pieces)
        for dim, have in lies.items():
            rows = have[-1][1]
            if rows != tensor.shape[dim]:
                return f"has {tensor.shape[dim]} rows for the full field, and {rows} on the ranks together"
        by_tensor.append(lies)
    # The output's tensors stand behind the inputs.
    inputs = by_tensor[: len(full.inputs)]
    outputs = by_tensor[len(full.inputs) :]
    if full.module is not None:
        if isinstance(full.module, CHANNELS_FIRST) and min(inputs[0], default=2) < 2:
            return "gets rows as its channels: the plan's `space.dim` is another dim"
        note(full.module, inputs[0], index)
        return ""
    if not full.inputs and full.name == "the output":
        return _output_problem(outputs, tensors, field)
    problem = _operator_problem(full, inputs, outputs)
    # As text: a NaN that fills a mask is not equal to itself.
    if full.name not in SIZED and any(repr(call.scalars) != repr(full.scalars) for call in locals_):
        problem = "takes a number that depends on the number of rows"
    if problem:
        problem += "; put it into a module of its own, and give that a style in the plan's `space.styles`"
    return problem


def _lies(full: Tensor, pieces: Sequence[Tensor]) -> Lies:
    """How the dims of a tensor lie over the ranks in which the ranks' pieces are not as long as the full one."""
    lies = {}
    for dim, length in enumerate(full.shape):
        lengths = [piece.shape[dim] for piece in pieces]
        if lengths[0] != length:
            ends = list(accumulate(lengths))
            lies[dim] = tuple(zip([0, *ends], ends, strict=False))
    return lies


def _output_problem(outputs: Sequence[Lies], tensors: Sequence[Tensor], field: Field) -> str:
    """Why the model's output does not go with its targets; empty if it does."""
    for lies, tensor in zip(outputs, tensors, strict=True):
        if field.targets is None and lies:
            return "is a field, and the plan's `space.targets` is None: it takes the dim of the targets' rows"
        if field.targets is not None and len(lies) != 1:
            return f"has no rows, and the plan's `space.targets` is {field.targets}: None if it is no field"
        for dim, have in lies.items():
            if have != strips(tensor.shape[dim], len(have)):
                return f"lies as {have} over the ranks, and not in strips"
    return ""


def _operator_problem(full: Call, inputs: Sequence[Lies], outputs: Sequence[Lies]) -> str:
    """Why an operator is refused that is in no module with a style; empty if it is not."""
    if not any(inputs):
        if any(outputs) and full.name not in MOVES.split():
            return "makes rows that depend on their places"
        return ""
    if full.pointwise or full.name in MOVES.split():
        return ""
    shape = full.inputs[0].shape
    if full.name in VIEWS and len(inputs[0]) == len(outputs[0]) == 1:
        (dim,) = inputs[0]
        (new_dim,) = outputs[0]
        # What is before the rows stays so: each rank's rows stay together.
        if prod(shape[:dim]) == prod(full.output.shape[:new_dim]):
            return ""
    if full.name in ALONG.split() and full.dims:
        rows = {dim for lies in inputs for dim in lies}
        if not rows & {dim % len(shape) for dim in full.dims}:
            return ""
    return "may mix rows of the field"
