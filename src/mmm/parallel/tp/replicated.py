"""Modules and parameters that every rank of the tp axis has in full.

Their parameters become `DTensor` all the same, replicated over tp. Among sharded parameters, plain tensors would break
whatever takes all parameters at once (AdamW's foreach, gradient clipping, FSDP's groups). A forward computes with this
rank's plain tensors, so that a module may be of any kind, and take and return what it likes. What matters is whose
activations it computes on::

    Replicated                              PartialGradient
    x, the same on each rank                x₀ │ x₁      this rank's heads, channels or tokens
      │ the same computation                  │          the same parameters
    gradient: full, the same on each        gradient: a partial sum on each: they are added up over tp

A norm before a matrix that is sharded by columns is an example of the first; a norm over the dim of each head, between
such a matrix and one that is sharded by rows, of the second. With the two mixed up, the loss stays right and a gradient
becomes wrong: the first, summed, is tp times too large; the second, not summed, lacks the other ranks' terms.
``mmm verify`` finds either, by the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import Self

from mmm.torch_private.module import BatchNorm, own_parameters
from mmm.torch_private.operators import tree_map_only

# Maps the name of a parameter to the module that has it, and its name in that module.
Owners = dict[str, tuple[nn.Module, str]]


class NamedStyle(ParallelStyle):
    """Replicates parameters over tp. A plan may give such a style to single parameters as well.

    Attributes:
        names: the parameters that the style is for, by their names in the module whose forward uses them. None: all
            that have no style yet.
        gradient: how a rank's gradient of such a parameter relates to the full one.
    """

    names: frozenset[str] | None = None
    gradient: Placement

    def of_parameters(self, names: frozenset[str]) -> Self:
        """A copy of this style for some parameters only."""
        style = copy(self)
        style.names = names
        return style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        owners = replicate(module, self.names, device_mesh)
        compute_with_local(module, owners, lambda name, full: full.to_local(grad_placements=[self.gradient]))
        return module


class Replicated(NamedStyle):
    """Replicate parameters over tp, for a module that computes the same on each rank. Its inputs and outputs are full
    tensors."""

    # Every rank computes the full gradient: nothing is summed.
    gradient = Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if self.names is None:
            module.register_forward_pre_hook(lambda module, args, kwargs: _full((args, kwargs)), with_kwargs=True)
            module.register_forward_hook(lambda module, args, output: _full(output))
        return module


class PartialGradient(NamedStyle):
    """Replicate parameters over tp, for a module that computes on only this rank's activations, such as its heads.
    Gradients are partial sums, and are added up over tp. Its inputs and outputs stay as they are on each rank."""

    # FSDP and ZeRO add the gradient up over tp before they reduce it over dp.
    gradient = Partial()

    def problem(self, module: nn.Module) -> str:
        """Why this cannot be right on a module, and what to do; empty where it can."""
        if isinstance(module, BatchNorm):
            return "would normalize by the statistics of only this rank's activations: use a norm of each sample"
        if getattr(module, "scale_grad_by_freq", False):
            return "would count only this rank's tokens: leave scale_grad_by_freq out"
        return ""


def replicate(module: nn.Module, names: frozenset[str] | None, mesh: DeviceMesh) -> Owners:
    """Replicate over tp the parameters of `module` that no style has taken yet, in place.

    Args:
        names: only these parameters; None: all.

    Returns:
        The parameters that were replicated.
    """
    owners: Owners = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        is_named = names is None or name in names
        if not is_named or isinstance(parameter, DTensor):
            continue
        path, _, own_name = name.rpartition(".")
        owner = module.get_submodule(path)
        owners[name] = (owner, own_name)
        full = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        own_parameters(owner)[own_name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    return owners


def compute_with_local(module: nn.Module, owners: Owners, to_local: Callable[[str, DTensor], Tensor]) -> None:
    """Have the forward of `module` find this rank's plain tensors in place of its parameters; changes it in place.

    This replaces the forward and is not a hook, so that activation checkpointing computes it again in the same way.

    Args:
        owners: the parameters, from `replicate`.
        to_local: function of a parameter's name and its `DTensor` that returns what this rank computes with.
    """
    forward = module.forward

    @wraps(forward)
    def local_forward(*args: Any, **kwargs: Any) -> Any:
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, (owner, own_name) in owners.items():
                parameter = own_parameters(owner)[own_name]
                # A plain tensor: this forward runs inside another forward of the same module.
                if not isinstance(parameter, DTensor):
                    continue
                replaced.append((owner, own_name, parameter))
                local = to_local(name, parameter)
                own_parameters(owner)[own_name] = local  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for owner, own_name, parameter in replaced:
                own_parameters(owner)[own_name] = parameter

    module.forward = local_forward  # type: ignore[method-assign]


def _full(tensors: Any) -> Any:
    """Replace each `DTensor` in a structure of any kind by its full plain tensor, which is the same on each rank."""

    def full(x: DTensor) -> Tensor:
        # An all-gather over tp where `x` is sharded, an all-reduce where it is a partial sum.
        return x.redistribute(placements=[Replicate()]).to_local()

    return tree_map_only(DTensor, full, tensors)
