"""Matrices that `ColwiseParallel` and `RowwiseParallel` do not take as they are.

A fused matrix computes several things at once, one after the other, such as queries, keys and values. Equal parts of
its columns are then not what a rank computes on::

    columns           [ q₀ q₁ │ k₀ k₁ │ v₀ v₁ ]       with 2 ranks, a rank would have [ q₀ q₁ k₀ ]
      │ matmul, columns in equal parts; all-gather
      ▼
    of rank 0           q₀      k₀      v₀            what its heads need
      │ backward: the ranks' gradients are partial sums: reduce-scatter
      ▼

The weight is a `DTensor` of equal parts all the same: a checkpoint has it as one device has. What it costs beside
columns whose order fits is an all-gather of the activations. Some matrices, such as the ``Conv1D`` of Hugging Face's
GPT-2, keep their weight as (in, out), where ``nn.Linear`` has (out, in).

What both give may be written in place, as ``output += x`` and ``nn.ReLU(inplace=True)`` do; PyTorch's styles give a
view that refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.errors import LayoutError


class SectionedColwise(ParallelStyle):
    """Shard a matrix by columns; its output is this rank's part of each section, one after the other.

    Args:
        sections: (channels, parts) of each, in their order: rank r of n has part ``r * parts // n``. n parts: each rank
            has its own. 1: all have all of it, as of a key head that all query heads share. None at all: the matrix is
            sharded in equal parts, and nothing is gathered.
        transposed: whether the weight is (in, out).
    """

    def __init__(self, *sections: tuple[int, int], transposed: bool = False) -> None:
        super().__init__()
        self.sections, self.transposed = sections, transposed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements: dict[str, Placement] = {"weight": Shard(1 if self.transposed else 0), "bias": Shard(0)}

        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            if not self.sections:
                return output.redistribute(placements=[Shard(-1)]).to_local().clone()
            full = output.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            own = []  # (…, channels / parts) of each section
            for (channels, parts), section in zip(self.sections, full.split(self.widths(full), -1), strict=True):
                own.append(section.narrow(-1, _part(mesh, parts) * (channels // parts), channels // parts))
            return torch.cat(own, -1)

        return _distribute(module, device_mesh, placements, Replicate(), leave)

    def widths(self, full: Tensor) -> list[int]:
        """Channels of the sections. Raises LayoutError where they are not those of the output."""
        widths = [channels for channels, _ in self.sections]
        if sum(widths) != full.shape[-1]:
            raise LayoutError(f"sections of {widths} channels of a matrix that gives {full.shape[-1]}")
        return widths


class OwnedRowwise(ParallelStyle):
    """`RowwiseParallel` whose output may be written in place.

    Args:
        transposed: whether the weight is (in, out).
    """

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(placements=[Replicate()]).to_local().clone()

        placements: dict[str, Placement] = {"weight": Shard(0 if self.transposed else 1), "bias": Replicate()}
        return _distribute(module, device_mesh, placements, Shard(-1), leave)


def _part(mesh: DeviceMesh, parts: int) -> int:
    """Which part of a section this rank has."""
    rank, size = mesh.get_local_rank(), mesh.size()
    if size % parts:
        raise LayoutError(f"tp {size}: a section in {parts} parts does not go over as many ranks")
    return rank * parts // size


def _distribute(
    module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], entering: Placement, leave: Any
) -> nn.Module:
    """Shard a matrix's weight and bias; its input is local, and is `entering`."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for own_name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [placements[own_name]])
            module.register_parameter(own_name, nn.Parameter(sharded, parameter.requires_grad))

    def enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return DTensor.from_local(inputs[0], mesh, [entering], run_check=False), *inputs[1:]

    return distribute_module(module, mesh, partition, enter, leave)  # type: ignore[arg-type]
