"""Batch normalization over the global batch, for a program with its own `DeviceMesh`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.dp.batch_norm import FORWARDS, GlobalForward
from mmm.torch_private.module import BatchNorm


def sync_batch_norm(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have the BatchNorms of `model` take the statistics of all ranks' samples, in place.

    Does what ``nn.SyncBatchNorm`` does, on any device. Modules with a forward of their own stay as they are.

    Args:
        mesh: the axes whose ranks have different samples.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for module in model.modules():
        if isinstance(module, BatchNorm) and type(module).forward in FORWARDS:
            module.forward = GlobalForward(module, groups)  # type: ignore[method-assign, assignment]
