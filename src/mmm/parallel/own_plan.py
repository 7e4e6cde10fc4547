"""A plan that anyone writes: its styles may stand at single parameters, and are checked before they are applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmm.errors import LayoutError
from mmm.parallel import plan
from mmm.parallel.plan import matches
from mmm.parallel.tp.checks import check_style, is_known, one_tensor
from mmm.parallel.tp.conv1d import is_conv1d, shard_conv1d
from mmm.parallel.tp.replicated import NamedStyle

# Modules without a forward: what they have is used in that of the module around them.
CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


class Plan(plan.Plan):
    __doc__ = plan.Plan.__doc__

    def placed(self, model: nn.Module, tp: int) -> Plan:
        """The plan for `model` alone: each module by its path, with styles that have been checked.

        Raises:
            LayoutError: two styles for one, or one that cannot be right on what it is given to.
        """
        styles: dict[str, list[ParallelStyle]] = {}
        for path, style in _styles(model, self, tp):
            check_style(model, path, style, tp)
            styles.setdefault(path, []).append(style)
        return replace(self, tensor={path: InTurn(path, some) for path, some in styles.items()})


class InTurn(ParallelStyle):
    """Several styles for one module: those of single parameters first."""

    def __init__(self, path: str, styles: list[ParallelStyle]) -> None:
        """path: of the module, for messages."""
        super().__init__()
        self.path, self.styles = path, styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            if is_known(style) and isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel):
                one_tensor(module, self.path, style)
            if is_conv1d(module) and type(style) in (ColwiseParallel, RowwiseParallel):
                shard_conv1d(module, device_mesh, style)  # type: ignore[arg-type]
            else:
                parallelize_module(module, device_mesh, style)
        return module


def _styles(model: nn.Module, plan: Plan, tp: int) -> Iterator[tuple[str, ParallelStyle]]:
    """(path of a module, its style) of what the plan's `tensor` names, inner modules first: what is left of a module's
    parameters is then for its own style.

    Raises:
        LayoutError: a module or a parameter has two styles.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    parameters = list(model.named_parameters(remove_duplicate=False))
    named: dict[int | str, tuple[str, ParallelStyle]] = {}
    for pattern, style in sorted(plan.tensor.items(), key=lambda item: -item[0].count(".")):
        for name, given in (*modules, *(parameters if isinstance(style, NamedStyle) else [])):
            if not name or not matches(pattern, name):
                continue
            key = id(given) if isinstance(given, nn.Module) else name
            if key not in named:
                named[key] = name, style
                yield _where(model, name, given, style)
            elif _text(named[key][1]) != _text(style):
                before, other = named[key]
                both = f"{_text(other)} and{'' if before == name else f', as {name},'} {_text(style)}"
                raise LayoutError(f"tp {tp}: the plan gives {before} {both}: leave one of them out")


def _where(model: nn.Module, name: str, given: Any, style: ParallelStyle) -> tuple[str, ParallelStyle]:
    """The module whose forward uses what the plan names, and the style for it."""
    if not isinstance(style, NamedStyle):
        return name, style
    if isinstance(given, nn.Module) and not isinstance(given, CONTAINERS):
        return name, style
    path = name.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), CONTAINERS):
        path = path.rpartition(".")[0]
    if isinstance(given, nn.Module):
        parameters = [f"{name}.{own}" for own, _ in given.named_parameters()]
    else:
        parameters = [name]
    return path, style.of_parameters(frozenset(own.removeprefix(f"{path}.") for own in parameters))


def _text(style: ParallelStyle) -> str:
    return f"{type(style).__name__}()" if isinstance(style, NamedStyle) else repr(style)
