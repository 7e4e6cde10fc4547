"""Runs of a model on the meta device, with the full field or a rank's rows of it: which operators does it call, and
which modules that have a style?"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import walk_stack, walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError, LayoutError, UserError
from mmm.nn.init import class_name
from mmm.parallel.cp.space.operators import PROBLEMS, Style, is_local, style_of
from mmm.parallel.cp.space.pools import mean_of_rows
from mmm.parallel.cp.space.strips import own_rows
from mmm.parallel.plan import Field
from mmm.parallel.user_line import user_line
from mmm.torch_private.operators import TorchDispatchMode, schema_arguments, tensors_in, tree_map_only

# Samples of the record. A batch norm takes no single one.
BATCH = 2


class Call(NamedTuple):
    """An operator, or a module that has a style, that a run has called.

    Attributes:
        name: its name.
        line: the line of the program that calls it.
        arguments: what it got, by name; tensors are on the meta device.
        output: what it returned.
        caller: the module, or the operator. None: this stands for the output of the model.
    """

    name: str
    line: str
    arguments: Mapping[Any, Any]
    output: Any
    caller: Any = None

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in(self.arguments)

    @property
    def tensors(self) -> list[Tensor]:
        return self.inputs + tensors_in(self.output)

    def refused(self, problem: str) -> ConfigError:
        return ConfigError(f"cp_style space: {self.name}{self.line} {problem}")


def _line() -> str:
    """The line of the program that is running."""
    return user_line(reversed([*walk_stack(sys._getframe())]))


class Record(TorchDispatchMode):
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
        # Whether a module with a style is running: what it does inside is its style's.
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.is_inside:
            # Without its argument, an operator goes along its default: `amax`, `roll` and norms along all dims.
            arguments = {argument.name: argument.default_value for argument in schema_arguments(func)}
            arguments.update(zip(arguments, args, strict=False))
            arguments.update(kwargs)
            self.calls.append(Call(func.overloadpacket.__name__, _line(), arguments, output, func))
        return output

    def call(self, name: str, module: nn.Module, style: Style | None, *args: Any, **kwargs: Any) -> Any:
        """Stand for the forward of a module that has a style. With a rank's rows, only shapes are made."""
        own_forward = partial(type(module).forward, module, *args, **kwargs)
        if self.is_inside:
            return own_forward()
        arguments: dict[Any, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        call = Call(f"{name} ({class_name(module)})", _line(), arguments, None, module)
        self.is_inside = True
        if self.rank is None and style in PROBLEMS:
            problem = PROBLEMS[style](module, self.ranks, *args, **kwargs)
            if problem:
                raise call.refused(f"with {problem}")
        # What treats each place by itself does so with a rank's rows, and fails if these are its channels.
        if self.rank is None or style is None:
            output = own_forward()
        else:
            # If it is of another module, its name is, too.
            full = self.full[len(self.calls)]
            output = tree_map_only(Tensor, partial(self._own, full, call, style), full.output)
        self.is_inside = False
        self.calls.append(call._replace(output=output))
        return output

    def _own(self, full: Call, call: Call, style: Style | None, output: Tensor) -> Tensor:
        """What a rank has of a module's output, without values.

        Args:
            full: the call with the full field, and `output` what it returned.
            call: the same with the rank's rows.
        """
        for dim, length in enumerate(full.inputs[0].shape):
            rows = call.inputs[0].shape[dim]
            if rows == length or style is mean_of_rows:
                continue
            if output.shape[dim] == length:
                output = output.narrow(dim, 0, rows)
                continue
            try:
                output = self.own(output, dim)
            except LayoutError as error:
                raise LayoutError(f"{error} ({call.name}{call.line} makes it)") from None
        return output.contiguous()

    def own(self, field: Tensor, dim: int | None) -> Tensor:
        """What this run has of a tensor whose rows are `dim`. None: it has no rows."""
        if self.rank is None or dim is None:
            return field
        return own_rows(field, self.ranks, self.rank, dim)


def run(model: nn.Module, field: Field, record: Record) -> list[Call]:
    """Run forward on the meta device, and return the calls. The last one stands for the output."""
    # The model itself may be on any device, and stays as it is.
    state = {}
    dtype = None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = record.own(tensor.to("meta"), field.parameters.get(name))
        real = tensor.dtype.to_real()
        if dtype is None and real.is_floating_point:
            dtype = real
    inputs = torch.empty(BATCH, *field.shape, dtype=dtype, device="meta")
    inputs = record.own(inputs, field.dim)
    whose = "the full field" if record.rank is None else "a rank's rows"
    try:
        with _known(model, field, record), record, torch.no_grad():
            output = torch.func.functional_call(model, state, (inputs,))
    except UserError:
        raise
    # A user's forward may raise anything.
    except Exception as error:
        line = user_line(walk_tb(error.__traceback__))
        raise ConfigError(
            f"cp_style space: forward fails with {whose}{line}: {type(error).__name__}: {error}; a parameter or a "
            f"buffer that is a field belongs into the plan's `space.parameters`"
        ) from error
    return [*record.calls, Call("the output", "", {}, output)]


@contextmanager
def _known(model: nn.Module, field: Field, record: Record) -> Iterator[None]:
    """Inside, the forward of each module that has a style, or is local, is the record's."""
    replaced = []
    try:
        for name, module in model.named_modules():
            style = style_of(module, field.styles)
            if style is not None or is_local(module):
                replaced.append((module, module.__dict__.get("forward")))
                module.forward = partial(record.call, name, module, style)
        yield
    finally:
        for module, forward in replaced:
            del module.forward
            if forward is not None:
                module.forward = forward
