"""Matrices that stand for several side by side (q, k and v in one, or gate and up), and outputs written in place.

Equal parts of the columns of a fused matrix are not what a rank computes on::

    columns           [ q₀ q₁ │ k₀ k₁ │ v₀ v₁ ]       with 2 ranks, a rank would have [ q₀ q₁ k₀ ]
      │ matmul, columns in equal parts; all-gather
      ▼
    of rank 0           q₀      k₀      v₀            what its heads need
      │ backward: the ranks' gradients are partial sums: reduce-scatter
      ▼

The weight is a `DTensor` of equal parts all the same: a checkpoint has it as one device has. What it costs beside
columns whose order fits is an all-gather of the activations.

What both styles give may be written in place, as ``output += x`` and ``nn.ReLU(inplace=True)`` do; PyTorch's styles
give a view that refuses it. Both take the Conv1D of transformers as well (`mmm.parallel.tp.conv1d`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.errors import LayoutError
from mmm.parallel.tp.conv1d import column_dim, is_conv1d, shard_conv1d


class SectionedColwise(ColwiseParallel):
    """Shard a matrix by columns; its output is this rank's part of each section, one after the other.

    What the model splits after it has the widths of this rank: a ``split(embed_dim, 2)`` in it has to become
    ``chunk(3, 2)``, or ``embed_dim`` that of a rank.

    Args:
        sections: (channels, parts) of each, in their order: rank r of n has part ``r * parts // n``. n parts, or the
            channels alone: each rank has its own. 1: all have all of it, as of a key head that all query heads share.
            None at all: the matrix is sharded in equal parts, and nothing is gathered.
    """

    def __init__(self, *sections: int | tuple[int, int]) -> None:
        super().__init__(use_local_output=False)
        self.sections = sections

    def _parts(self, tp: int) -> list[tuple[int, int]]:
        """(channels, parts) of each section."""
        return [(section, tp) if isinstance(section, int) else section for section in self.sections]

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a matrix cannot be sharded so by `tp` ranks, and what to do; empty where it can."""
        columns = module.get_parameter("weight").shape[column_dim(module)]
        sections = self._parts(tp)
        widths = [channels for channels, _ in sections]
        if isinstance(module, nn.Embedding) or (widths and sum(widths) != columns):
            return f"is given {' + '.join(map(str, widths))} columns, and there are {columns}: give those of each"
        for channels, parts in sections:
            if tp % parts:
                return f"has a section in {parts} parts, which do not go over {tp} ranks"
            if channels % parts:
                return f"splits {channels} columns, which {parts} ranks do not divide: use a tp that does"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        problem = self.problem(module, device_mesh.size())
        if problem:
            raise LayoutError(f"tp {device_mesh.size()}: SectionedColwise {problem}")
        if is_conv1d(module):
            shard_conv1d(module, device_mesh, self)
        else:
            super()._apply(module, device_mesh)
        sections = self._parts(device_mesh.size())

        def own_sections(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            if not sections:
                return output.to_local().clone()
            full = output.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            own = []  # (…, channels / parts) of each section
            for (channels, parts), section in zip(sections, full.split([n for n, _ in sections], -1), strict=True):
                part = device_mesh.get_local_rank() * parts // device_mesh.size()
                own.append(section.narrow(-1, part * (channels // parts), channels // parts))
            return torch.cat(own, -1)

        module.register_forward_hook(own_sections)
        return module

    def __repr__(self) -> str:
        return f"SectionedColwise({', '.join(map(str, self.sections))})"


class OwnedRowwise(RowwiseParallel):
    """`RowwiseParallel` whose output may be written in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if is_conv1d(module):
            shard_conv1d(module, device_mesh, self)
        else:
            super()._apply(module, device_mesh)
        module.register_forward_hook(lambda module, inputs, output: output.clone())
        return module
