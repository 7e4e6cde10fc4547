"""Tensor parallelism: the matrices of a layer sharded over the ranks of the tp axis.

``Y = X A`` with columns sharded: each rank has some columns of A, and computes these columns of Y.
``Y = X A`` with rows sharded: each rank has some rows of A and the same columns of X, and computes a partial sum of Y;
the ranks add these up. A matrix sharded by columns and then one sharded by rows need one all-reduce
for the two.

The plans of `mmm.models` take the styles of `mmm.parallel.tp.local`. A plan of your own may also take PyTorch's, such
as `ColwiseParallel` and `RowwiseParallel`.

Source: Shoeybi et al., "Megatron-LM", 2019; with the sequence sharded in between: Korthikanti et al., 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmm.errors import LayoutError
from mmm.nn.dropout import Dropout
from mmm.parallel.plan import Plan, find, matches
from mmm.parallel.ties import find_ties
from mmm.parallel.tp.checks import check_inside, check_style, is_known, pass_inputs_by_position
from mmm.parallel.tp.conv1d import is_conv1d, shard_conv1d
from mmm.parallel.tp.replicated import NamedStyle
from mmm.parallel.values import names_in_message
from mmm.runtime.device import refuse_faults
from mmm.torch_private.groups import differentiate_twice, leave_generators_alone, tell_embeddings_apart

# Modules without a forward of their own: the module around them computes with their parameters.
CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Shard `model` in place over the one-dimensional `mesh`. Names of the plan that the model lacks are skipped.

    Goes module by module, because `parallelize_module` with a plan would shard a module with two names twice.

    Raises:
        LayoutError: a module has two styles, or one that cannot be right on it; or a parameter has no style: among
            sharded ones it would not compute, or not be updated, alike on all ranks.
    """
    tp = mesh.size()
    _leave_generators_alone(mesh)
    tell_embeddings_apart()
    differentiate_twice(partial(refuse_faults, "create_graph=True", "tp"))
    # `retie` refuses tied weights by their names.
    exempt: set[str] = set()
    for tie in find_ties(model):
        exempt |= set(tie)
    styles = list(styles_of(model, plan, tp))
    check_inside(styles, tp)
    for path, style in styles:
        check_style(model, path, style, tp)
    # Inner modules first: what is left of a module's parameters is then for its own style.
    styles.sort(key=lambda pair: _depth(pair[0]), reverse=True)
    for path, style in styles:
        _apply_style(model.get_submodule(path), style, mesh)
    # Experts have a mesh of their own (`apply_expert_parallel`).
    experts: set[int] = set()
    for pattern in plan.experts:
        for module in find(model, pattern):
            experts |= {id(parameter) for parameter in module.parameters()}
    if plan.rest is not None:
        _apply_rest(model, plan.rest, mesh, experts)
    without_style = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or id(parameter) in experts:
            continue
        if name not in exempt:
            without_style.append(name)
    if without_style:
        names = names_in_message(without_style)
        raise LayoutError(
            f"tp {tp}: the plan's `tensor` has no style for {names}: name them, or their modules, as "
            f"Replicated() where every rank computes the same, PartialGradient() where each has its own heads"
        )


def _apply_rest(model: nn.Module, style: ParallelStyle, mesh: DeviceMesh, experts: set[int]) -> None:
    """Give the plan's `rest` to all parameters that have no style yet.

    Args:
        experts: ids of the parameters of experts.

    Raises:
        LayoutError: it is not a style for parameters.
    """
    if not isinstance(style, NamedStyle):
        raise LayoutError(f"the plan's `rest` is {_text(style)}: it has to be Replicated() or PartialGradient()")
    # A tied parameter has a style in each module that has it: `retie` makes it one again.
    names: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) or id(parameter) in experts:
            continue
        path = _path_around(model, name)
        own_names = names.setdefault(path, set())
        own_names.add(name.removeprefix(f"{path}."))
    for path, own_names in names.items():
        module = model.get_submodule(path)
        named_style = style.of_parameters(frozenset(own_names))
        parallelize_module(module, mesh, named_style)


def _depth(path: str) -> int:
    """Return how many modules are around the module of that path, or its pattern."""
    return path.count(".")


def styles_of(model: nn.Module, plan: Plan, tp: int) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield (path of a module, its style) for what the plan's `tensor` names; those of single parameters first.

    Raises:
        LayoutError: a module or a parameter has two styles.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    parameters = list(model.named_parameters(remove_duplicate=False))
    # Modules by their id, because one may have two names; parameters by their name.
    styled: dict[int | str, tuple[str, ParallelStyle]] = {}
    for pattern in sorted(plan.tensor, key=_depth, reverse=True):
        style = plan.tensor[pattern]
        targets: list[tuple[str, Any]] = list(modules)
        if isinstance(style, NamedStyle):
            targets += parameters
        for name, target in targets:
            # The model itself has an empty name, and is not one of its modules.
            if not name or not matches(pattern, name):
                continue
            key: int | str = name
            if isinstance(target, nn.Module):
                key = id(target)
            if key not in styled:
                styled[key] = (name, style)
                yield _module_and_style(model, name, target, style)
                continue
            first_name, first_style = styled[key]
            first_text = _text(first_style)
            text = _text(style)
            if first_text != text:
                # A module may have a second name.
                if first_name != name:
                    text = f"as {name}, {text}"
                    first_text += " and,"
                else:
                    first_text += " and"
                raise LayoutError(f"tp {tp}: the plan gives {first_name} {first_text} {text}: leave one of them out")


def _module_and_style(
    model: nn.Module,
    name: str,
    target: nn.Module | nn.Parameter,
    style: ParallelStyle,
) -> tuple[str, ParallelStyle]:
    """Return the path of the module whose forward uses what the plan names, and the style for it."""
    if not isinstance(style, NamedStyle):
        return name, style
    if isinstance(target, nn.Module) and not isinstance(target, CONTAINERS):
        return name, style
    # A parameter, or a container of parameters: the style is for these, in the module around them.
    path = _path_around(model, name)
    names = [name]
    if isinstance(target, nn.Module):
        names = [f"{name}.{parameter_name}" for parameter_name, _ in target.named_parameters()]
    own_names = set()
    for full_name in names:
        own_names.add(full_name.removeprefix(f"{path}."))
    return path, style.of_parameters(frozenset(own_names))


def _path_around(model: nn.Module, name: str) -> str:
    """Return the path of the module whose forward uses a parameter, or a container of them: empty for the model."""
    path, _, _ = name.rpartition(".")
    # A container has no forward that could find the parameter's local tensor.
    while path and isinstance(model.get_submodule(path), CONTAINERS):
        path, _, _ = path.rpartition(".")
    return path


def _apply_style(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    takes_one_input = isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel)
    if takes_one_input and is_known(style):
        pass_inputs_by_position(module)
    if is_conv1d(module) and type(style) in (ColwiseParallel, RowwiseParallel):
        shard_conv1d(module, mesh, style)  # type: ignore[arg-type]
    else:
        parallelize_module(module, mesh, style)


def _text(style: ParallelStyle) -> str:
    """A style as a plan would write it, for comparison and messages."""
    if isinstance(style, NamedStyle):
        return f"{type(style).__name__}()"
    return repr(style)


def _leave_generators_alone(mesh: DeviceMesh) -> None:
    """Keep the first random operator on a `DTensor` from giving all ranks the generator of rank 0, by a collective of
    all ranks. The ranks of a tp group have the same generator already, and other data-parallel coordinates another
    (`mmm.runtime.seed`)."""
    # Elsewhere PyTorch shares no generator, and its tracker asks for a device.
    if mesh.device_type not in ("cuda", "xpu"):
        return
    accelerator = getattr(torch, mesh.device_type)
    if accelerator.is_available():
        leave_generators_alone(mesh)


class ShardedDropout(ParallelStyle):
    """Have a `mmm.nn.dropout.Dropout` draw for this rank's shard of its input, whose second dim (units, heads or
    tokens) is sharded in equal pieces."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Dropout)
        module.shard = device_mesh.get_local_rank()
        return module
