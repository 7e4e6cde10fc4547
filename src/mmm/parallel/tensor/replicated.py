"""A module that tensor parallelism replicates: every rank of the tp axis has it, and computes the same.

Its parameters become `DTensor` all the same, replicated over tp. Beside sharded ones, plain tensors would break what
takes all parameters at once (AdamW's foreach, gradient clipping, FSDP's groups).

Each rank computes the full gradient from the same activations, so that nothing is summed over tp: a sum would be tp
times too large.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class Replicated(ParallelStyle):
    """Replicate a module's parameters over tp; its input and output are full tensors, the same on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _enter, _leave)  # type: ignore[arg-type]


def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        if isinstance(x, Tensor) and not isinstance(x, DTensor)
        else x
        for x in inputs
    )


def _leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(placements=[Replicate()]).to_local()
