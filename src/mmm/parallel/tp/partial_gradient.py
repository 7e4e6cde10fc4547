"""Modules and parameters that every rank of the tp axis has, and uses on activations of its own: `PartialGradient`.

`mmm.parallel.tp.replicated` has the other half, and says which is which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from mmm.errors import LayoutError
from mmm.parallel.tp.gradient_check import GradientCheck, difference
from mmm.parallel.tp.replicated import NamedStyle, compute_with, replicate
from mmm.torch_private.module import BatchNorm

ALIKE = 8  # elements that are the same on each rank are then no coincidence


class PartialGradient(NamedStyle):
    """Replicate parameters over tp, for a module that computes on activations of this rank alone, such as its heads:
    gradients are partial sums, and are added up over tp. What it takes and returns stays as it is on each rank.

    Raises:
        LayoutError: in the first forward or backward that shows that the ranks compute the same.
    """

    def problem(self, module: nn.Module) -> str:
        """Why this cannot be right on a module, and what to do; empty where it can."""
        if isinstance(module, BatchNorm):
            return "would normalize by the statistics of this rank's activations alone: use a norm of each sample"
        if getattr(module, "scale_grad_by_freq", False):
            return "would count this rank's tokens alone: leave scale_grad_by_freq out"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check = _PartialCheck(device_mesh, self.path)

        def local(name: str, parameter: DTensor) -> Tensor:
            return check.watch(name, parameter.to_local(grad_placements=[Partial()]))

        own = replicate(module, self.names, device_mesh)
        if own and len(own) == len(list(module.named_parameters(remove_duplicate=False))):  # none inside is sharded
            refuse_same_input(module, device_mesh, f"{self.path} is PartialGradient()")
        compute_with(module, own, local)
        return module


class _PartialCheck(GradientCheck):
    """Finds gradients that are the same on each rank, which a partial sum is not."""

    def __init__(self, mesh: DeviceMesh, path: str) -> None:
        super().__init__(mesh, path)
        self.alike: dict[str, int] = {}  # elements by name

    def judge(self, name: str, local: Tensor, off: float, size: float) -> str:
        self.alike[name] = self.alike.get(name, 0) + local.numel()
        if off > 0:
            self.compared.add(name)
        if off > 0 or self.alike[name] < ALIKE:
            return ""
        return (
            f"PartialGradient(), and the ranks have the same gradient of it, whose sum is {self.mesh.size()} times too "
            f"large: where each rank computes the same from the same activations, the plan has to say Replicated()"
        )


def refuse_same_input(module: nn.Module, mesh: DeviceMesh, what: str) -> None:
    """Have the first forward that is to be differentiated end in a LayoutError where a module that works on this rank's
    part of the activations is given the same on each rank.

    Args:
        what: the module is, for the message.
    """

    def compare(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        given = next((x for x in inputs if isinstance(x, Tensor) and x.requires_grad), None)
        if given is None or isinstance(given, DTensor) or given.numel() < ALIKE:
            return
        sizes = difference(given, mesh)
        if sizes is None:
            return  # the next one
        hook.remove()
        if sizes[0] == 0:
            raise LayoutError(
                f"tp {mesh.size()}: {what}, for this rank's heads, channels or tokens, and each rank gives it the same "
                f"input: where each computes the same from it, the plan has to say Replicated(); where each uses its "
                f"part of the result, ColwiseParallel() or KVHeads(), which add up the gradients of the input as well",
                on_every_rank=True,
            )

    hook = module.register_forward_pre_hook(compare)
