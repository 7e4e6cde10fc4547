"""Matrices that stand for several side by side: q, k and v in one (GPT-2, Phi-3), or gate and up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

from mmm.parallel.tp.conv1d import is_conv1d
from mmm.parallel.tp.replicated import Own, compute_with


class FusedColumns(ColwiseParallel):
    """`ColwiseParallel` for a Linear or a Conv1D that is several matrices side by side: each rank computes columns of
    each of them, such as q, k and v of its heads::

        weight       [ q₀ q₁ │ k₀ k₁ │ v₀ v₁ ]     sharded over tp as any other, as the model has it: saved, loaded and
          │ all-gather over tp                      updated as that (in backward a reduce-scatter of the gradient)
          ▼
        forward      q₀ k₀ v₀      q₁ k₁ v₁         (batch, seq, (q + k + v) / tp), plain, on each rank

    What the model splits after it has the widths of this rank alone: a ``split(embed_dim, 2)`` in it has to become
    ``chunk(3, 2)``, or ``embed_dim`` that of a rank.
    """

    def __init__(self, *widths: int) -> None:
        """widths: columns of each matrix, such as heads · head_dim of q, of k and of v."""
        super().__init__()
        self.widths = widths

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a matrix cannot be sharded so by `tp` ranks, and what to do; empty where it can."""
        columns = module.get_parameter("weight").shape[_dim(module, "weight")]
        if isinstance(module, nn.Embedding) or sum(self.widths) != columns:
            return f"is given {' + '.join(map(str, self.widths))} columns, and there are {columns}: give those of each"
        if odd := [width for width in self.widths if width % tp]:
            return f"splits {odd[0]} columns, which {tp} ranks do not divide: use a tp that does"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp, rank = device_mesh.size(), device_mesh.get_local_rank()
        own: Own = {}
        for name, parameter in list(module.named_parameters()):
            full = distribute_tensor(parameter.detach(), device_mesh, [Shard(_dim(module, name))])
            module.register_parameter(name, nn.Parameter(full, requires_grad=parameter.requires_grad))
            own[name] = module, name

        def local(name: str, parameter: DTensor) -> Tensor:
            dim = _dim(module, name)
            full = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return torch.cat([matrix.chunk(tp, dim)[rank] for matrix in full.split(self.widths, dim)], dim)

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
            (x,) = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        compute_with(module, own, local)
        module.register_forward_pre_hook(enter)
        if is_conv1d(module):
            module.nf //= tp  # type: ignore[operator,assignment]  # the width of what its forward returns
        return module

    def __repr__(self) -> str:
        return f"FusedColumns{self.widths}"


def _dim(module: nn.Module, name: str) -> int:
    """The dim of a parameter along which columns lie."""
    return int(name == "weight" and not isinstance(module, nn.Linear))
