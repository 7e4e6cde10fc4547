"""Batch normalization over the global batch, for a program with its own `DeviceMesh`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.dp.batch_norm import FORWARDS, GlobalForward
from mmm.torch_private.module import BatchNorm


def sync_batch_norm(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have the BatchNorms of `model` take the statistics of all ranks' samples, in place.

    Does what ``nn.SyncBatchNorm`` does, on any device. Modules with a forward of their own stay as they are, except
    timm's BatchNormAct2d.

    Args:
        mesh: the axes whose ranks have different samples.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for module in model.modules():
        if not isinstance(module, BatchNorm):
            continue
        if type(module).forward in FORWARDS:
            module.forward = GlobalForward(module, groups)  # type: ignore[method-assign, assignment]
        elif has_activation(module):
            normalize = GlobalForward(module, groups)
            module.forward = partial(_with_activation, module, normalize)  # type: ignore[method-assign]


def has_activation(module: BatchNorm) -> bool:
    """Whether a module is timm's BatchNormAct2d: a batch norm, then dropout and an activation of its own."""
    # By its name, because timm need not be installed.
    names = [cls.__name__ for cls in type(module).__mro__]
    return "BatchNormAct2d" in names


def _with_activation(module: Any, normalize: GlobalForward, x: Tensor) -> Tensor:
    return module.act(module.drop(normalize(x)))
