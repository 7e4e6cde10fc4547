"""Modules whose parameters every rank of the tp axis has.

Their parameters become `DTensor` all the same, replicated over tp. Beside sharded ones, plain tensors would break what
takes all parameters at once (AdamW's foreach, gradient clipping, FSDP's groups). What matters is whose activations they
see::

    Replicated                              PartialGradient
    x, the same on each rank                x₀ │ x₁      this rank's heads, channels or tokens
      │ the same computation                  │          the same parameters
    gradient: full, the same on each        gradient: a partial sum on each: they are added up over tp

A norm before a matrix that is sharded by columns is the first; a norm over the dim of each head, between such a matrix
and one that is sharded by rows, the second. A sum of the first would be tp times too large. The second, not summed, has
the right loss and a wrong gradient: so `Replicated` compares the ranks' gradients in the first backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.errors import LayoutError
from mmm.parallel.local import to_local
from mmm.torch_private.module import is_fake, own_parameters


class Replicated(ParallelStyle):
    """Replicate a module's parameters over tp; its input and output are full tensors, the same on each rank.

    Raises:
        LayoutError: in the first backward that gives a parameter a gradient, where that is not the same on each rank.
    """

    def __init__(self, path: str = "") -> None:
        """path: of the module, for the message."""
        super().__init__()
        self.path = path

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check = _SameGradients(device_mesh, self.path)
        module.register_forward_pre_hook(lambda module, inputs: check.watch(module))
        return distribute_module(module, device_mesh, None, _enter, _leave)  # type: ignore[arg-type]


class PartialGradient(ParallelStyle):
    """Replicate the parameters of a module that computes on activations of this rank alone, such as its heads: their
    gradients are partial sums, and are added up over tp. Input and output stay as they are on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own: list[tuple[nn.Module, str]] = []  # those of modules inside that have another style are that style's
        for inner in module.modules():
            for name, parameter in own_parameters(inner).items():
                if parameter is not None and not isinstance(parameter, DTensor):
                    full = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
                    own_parameters(inner)[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                    own.append((inner, name))
        replaced: list[tuple[nn.Module, str, Any]] = []

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            for inner, name in own:
                parameter: Any = own_parameters(inner)[name]
                replaced.append((inner, name, parameter))
                own_parameters(inner)[name] = parameter.to_local(grad_placements=[Partial()])

        def leave(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            while replaced:
                inner, name, parameter = replaced.pop()
                own_parameters(inner)[name] = parameter

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class _SameGradients:
    """Compares a module's gradients over tp, until each parameter has had one that is not 0."""

    def __init__(self, mesh: DeviceMesh, path: str) -> None:
        self.mesh, self.path = mesh, path
        self.watched: dict[str, nn.Parameter] = {}  # those still to compare
        self.compared: set[str] = set()

    def watch(self, module: nn.Module) -> None:
        """Before a forward: FSDP has gathered the parameters that its backward gives gradients to."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        for name, parameter in module.named_parameters():
            if name not in self.compared and parameter.requires_grad and self.watched.get(name) is not parameter:
                self.watched[name] = parameter
                parameter.register_hook(partial(self.compare, name))

    @torch.no_grad()
    def compare(self, name: str, gradient: Tensor) -> None:
        """A collective over tp."""
        if name in self.compared or (
            isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
        ):
            return  # a partial sum is added up
        local = to_local(gradient)
        if is_fake(local):
            return
        if local.is_complex():  # collectives find no maximum of complex numbers
            local = torch.view_as_real(local)
        group, first = self.mesh.get_group(), local.detach().contiguous().clone()
        dist.broadcast(first, group=group, group_src=0)
        finite = local.isfinite().all() & first.isfinite().all()
        facts = torch.stack([(local - first).abs().max(), first.abs().max(), (~finite).to(local.dtype)]).nan_to_num()
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=group)
        off, size, not_finite = facts.tolist()
        if not_finite or size == off == 0:
            return  # the next one
        self.compared.add(name)
        self.watched.pop(name, None)
        if not off <= torch.finfo(local.dtype).eps ** 0.5 * size:
            path = f"{self.path}.{name}".lstrip(".")
            raise LayoutError(
                f"tp {self.mesh.size()}: {path} is Replicated(), and the ranks' gradients of it are not the same (off "
                f"by {off:.1e}, the largest is {size:.1e}): where each rank computes on its own heads, channels or "
                f"tokens, as between a matrix sharded by columns and one by rows, the plan has to say "
                f"PartialGradient(), which adds the gradients up",
                on_every_rank=True,
            )


def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        if isinstance(x, Tensor) and not isinstance(x, DTensor)
        else x
        for x in inputs
    )


def _leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(placements=[Replicate()]).to_local()
