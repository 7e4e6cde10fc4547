"""Modules and parameters that every rank of the tp axis has.

Their parameters become `DTensor` all the same, replicated over tp. Beside sharded ones, plain tensors would break what
takes all parameters at once (AdamW's foreach, gradient clipping, FSDP's groups). A forward computes with this rank's
plain tensors, so that a module may be of any kind, and take and return what it likes. What matters is whose activations
it sees::

    Replicated                              PartialGradient
    x, the same on each rank                x₀ │ x₁      this rank's heads, channels or tokens
      │ the same computation                  │          the same parameters
    gradient: full, the same on each        gradient: a partial sum on each: they are added up over tp

A norm before a matrix that is sharded by columns is the first; a norm over the dim of each head, between such a matrix
and one that is sharded by rows, the second. A sum of the first would be tp times too large. The second, not summed, has
the right loss and a wrong gradient: ``mmm verify`` finds either, by the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import Self

from mmm.torch_private.module import BatchNorm, own_parameters
from mmm.torch_private.operators import tree_map_only

Own = dict[str, tuple[nn.Module, str]]  # name → the module that has the parameter, and its name there


class NamedStyle(ParallelStyle):
    """A style that a plan may give to single parameters as well.

    Attributes:
        names: of the parameters, in the module whose forward uses them; None: all that have no style yet.
    """

    names: frozenset[str] | None = None

    def of_parameters(self, names: frozenset[str]) -> Self:
        """This style for some parameters alone."""
        style = copy(self)
        style.names = names
        return style


class Replicated(NamedStyle):
    """Replicate parameters over tp, for a module that computes the same on each rank; what it takes and returns are
    full tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def local(name: str, parameter: DTensor) -> Tensor:
            return parameter.to_local(grad_placements=[Replicate()])

        compute_with(module, replicate(module, self.names, device_mesh), local)
        if self.names is None:
            module.register_forward_pre_hook(lambda module, args, kwargs: _full((args, kwargs)), with_kwargs=True)
            module.register_forward_hook(lambda module, args, output: _full(output))
        return module


class PartialGradient(NamedStyle):
    """Replicate parameters over tp, for a module that computes on activations of this rank alone, such as its heads:
    gradients are partial sums, and are added up over tp. What it takes and returns stays as it is on each rank."""

    def problem(self, module: nn.Module) -> str:
        """Why this cannot be right on a module, and what to do; empty where it can."""
        if isinstance(module, BatchNorm):
            return "would normalize by the statistics of this rank's activations alone: use a norm of each sample"
        if getattr(module, "scale_grad_by_freq", False):
            return "would count this rank's tokens alone: leave scale_grad_by_freq out"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def local(name: str, parameter: DTensor) -> Tensor:
            return parameter.to_local(grad_placements=[Partial()])

        compute_with(module, replicate(module, self.names, device_mesh), local)
        return module


def replicate(module: nn.Module, names: frozenset[str] | None, mesh: DeviceMesh) -> Own:
    """Replicate over tp those parameters of `module` that no style has taken yet, in place; of `names`, or all."""
    own: Own = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if (names is None or name in names) and not isinstance(parameter, DTensor):
            path, _, own_name = name.rpartition(".")
            own[name] = owner, _ = module.get_submodule(path), own_name
            full = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            own_parameters(owner)[own_name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    return own


def compute_with(module: nn.Module, own: Own, local: Callable[[str, DTensor], Tensor]) -> None:
    """Have the forward of `module` find other tensors in the place of parameters; in place. It is the forward and no
    hook, so that activation checkpointing computes it again in the same way.

    Args:
        own: of `replicate`. local: (name, the parameter) → what forward finds.
    """
    forward = module.forward

    @wraps(forward)
    def local_forward(*args: Any, **kwargs: Any) -> Any:
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, (owner, own_name) in own.items():
                parameter = own_parameters(owner)[own_name]
                if isinstance(parameter, DTensor):  # else in a forward of this module already
                    replaced.append((owner, own_name, parameter))
                    own_parameters(owner)[own_name] = local(name, parameter)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for owner, own_name, parameter in replaced:
                own_parameters(owner)[own_name] = parameter

    module.forward = local_forward  # type: ignore[method-assign]


def _full(tensors: Any) -> Any:
    """Full plain tensors, the same on each rank, in the place of each `DTensor` in a structure of any kind."""
    return tree_map_only(DTensor, lambda x: x.redistribute(placements=[Replicate()]).to_local(), tensors)
