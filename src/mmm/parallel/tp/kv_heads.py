"""Fewer key/value heads than tensor-parallel ranks: each rank needs the one that its query heads share.

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

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel


class KVHeads(ColwiseParallel):
    """`ColwiseParallel` for a matrix that computes `heads` key or value heads. Where there are fewer than ranks, each
    rank gets one full head, which it shares with tp / heads - 1 others."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

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
