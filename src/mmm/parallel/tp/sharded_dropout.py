"""Dropout between matrices that are sharded over tp: each rank draws for its own shard of the hidden units."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.models.dropout import Dropout


class ShardedDropout(ParallelStyle):
    """For a `mmm.models.dropout.Dropout` of (batch, units), whose units are sharded in equal parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Dropout)
        module.shard = device_mesh.get_local_rank()
        return module
