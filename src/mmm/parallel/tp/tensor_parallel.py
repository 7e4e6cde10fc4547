"""Tensor parallelism: the matrices of a layer sharded over the ranks of the tp axis.

``Y = X A``, columns sharded (`ColwiseParallel`): each rank has some columns of A, and computes those of Y alone.
``Y = X A``, rows sharded (`RowwiseParallel`): each rank has some rows of A and the same columns of X, and computes a
partial sum of Y; the ranks add these up. Columns, then rows, need one all-reduce for two matrices.

Source: Shoeybi et al., "Megatron-LM", 2019; with the sequence sharded in between: Korthikanti et al., 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmm.errors import ConfigError, LayoutError
from mmm.nn.dropout import Dropout
from mmm.parallel.plan import Plan, find, matches
from mmm.parallel.ties import find_ties
from mmm.parallel.tp.checks import by_place, check_style, is_known
from mmm.parallel.tp.conv1d import is_conv1d, shard_conv1d
from mmm.parallel.tp.replicated import NamedStyle
from mmm.torch_private.groups import differentiate_twice, leave_generators_alone

# Modules without a forward: what they have is used in that of the module around them.
CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Shard `model` in place over the one-dimensional `mesh`; names of the plan that the model lacks are skipped.

    Module by module, because `parallelize_module` with a plan would shard a module with two names twice.

    Raises:
        LayoutError: two styles for one module, or one that cannot be right on what it is given to; a parameter without
            a style: beside sharded ones it would not compute, or not be updated, alike.
    """
    tied = {name for tie in find_ties(model) for name in tie}  # `retie` refuses those
    _leave_generators_alone(mesh)
    differentiate_twice(ConfigError)
    styles = list(_styles(model, plan, mesh.size()))
    for path, style in styles:
        check_style(model, path, style, mesh.size())
    # Inner modules first: what is left of a module's parameters is then for its own style.
    for path, style in sorted(styles, key=lambda pair: -pair[0].count(".")):
        _apply_style(model.get_submodule(path), style, mesh)
    experts = {id(p) for pattern in plan.experts for module in find(model, pattern) for p in module.parameters()}
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor) and id(p) not in experts]
    without = [name for name in plain if name not in tied]
    if without:
        raise LayoutError(
            f"tp {mesh.size()}: the plan's `tensor` has no style for {', '.join(without[:3])}"
            f"{f' and {len(without) - 3} more' if len(without) > 3 else ''}: name them, or their modules, "
            f"as Replicated() where every rank computes the same, PartialGradient() where each has its own heads"
        )


def _styles(model: nn.Module, plan: Plan, tp: int) -> Iterator[tuple[str, ParallelStyle]]:
    """(path of a module, its style) of what the plan's `tensor` names; those of single parameters first.

    Raises:
        LayoutError: a module or a parameter has two styles.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    parameters = list(model.named_parameters(remove_duplicate=False))
    styled: dict[int | str, tuple[str, ParallelStyle]] = {}
    for pattern, style in sorted(plan.tensor.items(), key=lambda item: -item[0].count(".")):
        for name, target in (*modules, *(parameters if isinstance(style, NamedStyle) else [])):
            if not name or not matches(pattern, name):  # the model itself is no module of it
                continue
            key = id(target) if isinstance(target, nn.Module) else name
            if key not in styled:
                styled[key] = name, style
                yield _where(model, name, target, style)
            elif _text(styled[key][1]) != _text(style):
                first, other = styled[key]
                also = "" if first == name else f", as {name},"
                both = f"{_text(other)} and{also} {_text(style)}"
                raise LayoutError(f"tp {tp}: the plan gives {first} {both}: leave one of them out")


def _where(
    model: nn.Module, name: str, target: nn.Module | nn.Parameter, style: ParallelStyle
) -> tuple[str, ParallelStyle]:
    """The module whose forward uses what the plan names, and the style for it."""
    if not isinstance(style, NamedStyle):
        return name, style
    if isinstance(target, nn.Module) and not isinstance(target, CONTAINERS):
        return name, style
    path = name.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), CONTAINERS):
        path = path.rpartition(".")[0]
    names = [name]
    if isinstance(target, nn.Module):
        names = [f"{name}.{own}" for own, _ in target.named_parameters()]
    return path, style.of_parameters(frozenset(own.removeprefix(f"{path}.") for own in names))


def _apply_style(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    if is_known(style) and isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel):
        by_place(module)
    if is_conv1d(module) and type(style) in (ColwiseParallel, RowwiseParallel):
        shard_conv1d(module, mesh, style)  # type: ignore[arg-type]
    else:
        parallelize_module(module, mesh, style)


def _text(style: ParallelStyle) -> str:
    return f"{type(style).__name__}()" if isinstance(style, NamedStyle) else repr(style)


def _leave_generators_alone(mesh: DeviceMesh) -> None:
    """Keep the first random operator on a `DTensor` from giving all ranks the generator of rank 0, by a collective of
    all: ranks of a tp group have the same already, other data-parallel coordinates another (`mmm.runtime.seed`)."""
    if mesh.device_type not in ("cuda", "xpu") or not getattr(torch, mesh.device_type).is_available():
        return  # no generator would be given away, and the tracker asks for a device
    leave_generators_alone(mesh)


class KVHeads(ColwiseParallel):
    """`ColwiseParallel` for a matrix that computes `heads` key or value heads. Where there are fewer than ranks, each
    rank gets one full head, which it shares with tp / heads - 1 others.

    With 2 key/value heads on 4 ranks, wk and wv are sharded by columns as usual, so that a rank computes half a head::

        wk           [ k₀ │ k₀ │ k₁ │ k₁ ]      columns: each rank 1/4 of them
          │ all-gather                           (batch, seq, kv heads · head_dim), small: that is why there are few
          ▼
        local          k₀   k₀   k₁   k₁         (batch, seq, head_dim) for the query heads of this rank
          │ backward: the ranks' gradients are partial sums, zero for the heads of others: reduce-scatter
          ▼
        attention      q₀   q₁   q₂   q₃

    Source: the rule that keys and values are shared by groups of query heads: Ainslie et al., "GQA", 2023.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def problem(self, module: nn.Module, tp: int) -> str:
        """Any number of columns fits: heads that `tp` does not divide are gathered."""
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.heads % device_mesh.size() == 0:
            return super()._apply(module, device_mesh)
        self.output_layouts, self.use_local_output = (Replicate(),), False
        module = super()._apply(module, device_mesh)
        n_rep = device_mesh.size() // self.heads
        head = device_mesh.get_local_rank() // n_rep

        def own_head(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            full = output.to_local(grad_placements=[Partial()])  # (batch, seq, kv heads · head_dim)
            return full.unflatten(-1, (self.heads, -1))[..., head, :]  # (batch, seq, head_dim)

        module.register_forward_hook(own_head)
        return module


class ShardedDropout(ParallelStyle):
    """For a `mmm.nn.dropout.Dropout` whose input's second dim (units, heads, tokens) is sharded in equal parts:
    each rank draws for its own shard."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Dropout)
        module.shard = device_mesh.get_local_rank()
        return module
