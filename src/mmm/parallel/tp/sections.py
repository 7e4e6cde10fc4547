"""Matrices that stand for several side by side (q, k and v in one, or gate and up), and outputs written in place.

A fused matrix that is sharded into equal pieces does not give a rank the columns that it computes on::

    columns           [ q₀ q₁ │ k₀ k₁ │ v₀ v₁ ]       with 2 ranks, a rank would have [ q₀ q₁ k₀ ]
      │ matmul with equal pieces of the columns; all-gather of the output over tp
      ▼
    on rank 0           q₀      k₀      v₀            what its heads need
      │ backward: the ranks' gradients are partial sums: reduce-scatter over tp
      ▼

The weight is a `DTensor` of equal pieces all the same, so a checkpoint has it as one device has. The price, compared
with columns whose order fits, is an all-gather of the activations.

A model may write in place to the outputs of both styles, as ``output += x`` and ``nn.ReLU(inplace=True)`` do. PyTorch's
styles return a view that refuses it. Both styles also take the Conv1D of transformers (`mmm.parallel.tp.conv1d`).
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
    """Shard a matrix by columns. Its output on a rank is that rank's part of each section, one after the other.

    What the model splits afterwards has the widths of this rank: a ``split(embed_dim, 2)`` has to become
    ``chunk(3, 2)``, or use the ``embed_dim`` of one rank.

    Args:
        sections: (channels, parts) of each section, in their order: rank r of n has part ``r * parts // n``. A section
            given as a number, its channels, has n parts: each rank has its own. With 1 part, all ranks have the whole
            section, such as a key head that all query heads share. Without any section, the matrix is sharded in equal
            pieces, and nothing is gathered.
    """

    def __init__(self, *sections: int | tuple[int, int]) -> None:
        super().__init__(use_local_output=False)
        self.sections = sections

    def _sections_on(self, tp: int) -> list[tuple[int, int]]:
        """(channels, parts) of each section on `tp` ranks."""
        return [(section, tp) if isinstance(section, int) else section for section in self.sections]

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a matrix cannot be sharded like this by `tp` ranks, and what to do; empty where it can."""
        columns = module.get_parameter("weight").shape[column_dim(module)]
        sections = self._sections_on(tp)
        widths = [channels for channels, _ in sections]
        differs = bool(widths) and sum(widths) != columns
        if isinstance(module, nn.Embedding) or differs:
            text = " + ".join(map(str, widths))
            return f"is given {text} columns, and there are {columns}: give those of each"
        for channels, parts in sections:
            if tp % parts:
                return f"has a section in {parts} parts, which do not go over {tp} ranks"
            if channels % parts:
                return f"splits {channels} columns, which {parts} ranks do not divide: use a tp that does"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = device_mesh.size()
        problem = self.problem(module, tp)
        if problem:
            raise LayoutError(f"tp {tp}: SectionedColwise {problem}")
        if is_conv1d(module):
            shard_conv1d(module, device_mesh, self)
        else:
            super()._apply(module, device_mesh)
        sections = self._sections_on(tp)
        widths = [channels for channels, _ in sections]

        def own_sections(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
            # `output` is sharded over tp by its last dim: (…, columns / tp) on each rank.
            if not sections:
                return output.to_local().clone()
            # (…, columns): all-gather over tp. In backward each rank has the gradient of its own parts only, a partial
            # sum of the full one, so that the ranks reduce-scatter it.
            replicated = output.redistribute(placements=[Replicate()])
            full = replicated.to_local(grad_placements=[Partial()])
            own = []
            # Each section: (…, channels).
            tensors = full.split(widths, -1)
            for (channels, parts), section in zip(sections, tensors, strict=True):
                index = device_mesh.get_local_rank() * parts // tp
                width = channels // parts
                # (…, channels / parts)
                own.append(section.narrow(-1, index * width, width))
            return torch.cat(own, -1)

        module.register_forward_hook(own_sections)
        return module

    def __repr__(self) -> str:
        return f"SectionedColwise({', '.join(map(str, self.sections))})"


class OwnedRowwise(RowwiseParallel):
    """`RowwiseParallel` whose output a model may write to in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if is_conv1d(module):
            shard_conv1d(module, device_mesh, self)
        else:
            super()._apply(module, device_mesh)
        # The style's own hook returns a view of a DTensor's memory; a clone has memory of its own.
        module.register_forward_hook(lambda module, inputs, output: output.clone())
        return module
