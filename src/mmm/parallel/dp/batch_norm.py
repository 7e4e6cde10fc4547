"""Batch normalization over the global batch: sums over all ranks that have other samples, on every device.

``nn.SyncBatchNorm``'s mathematics, which PyTorch has for accelerators alone. The statistics that a model keeps for
evaluation are those of the global batch as well, and so the same on every rank.

Source: Ioffe and Szegedy, "Batch Normalization", 2015.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.errors import ConfigError, config_field
from mmm.layout import Layout, Techniques
from mmm.nn.draw import class_name
from mmm.parallel.dp.microbatches import batch_norms, in_parts
from mmm.parallel.local import to_local
from mmm.parallel.mesh import Mesh
from mmm.torch_private.autograd import in_backward
from mmm.torch_private.module import BatchNorm, check_input_dim

AXES = ("dp_replicate", "dp_shard", "cp")  # whose ranks have different samples, or different places of them


class _Sum(torch.autograd.Function):
    """The sum over the ranks of `groups`, one after the other; in backward too, since each rank's loss is a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:  # type: ignore[override]
        ctx.groups = groups
        total = x.contiguous().clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.groups), None


def check_batch_norm(model: nn.Module, layout: Layout, techniques: Techniques) -> None:
    """Whether batch normalization can be that of the global batch; needs no process group.

    Raises:
        ConfigError: micro-batches or a pipeline, or a module of its own that is no more than derived from PyTorch's.
    """
    for name, module in batch_norms(model):
        if layout.pp > 1 or (techniques.microbatches or 1) > 1:
            pp = config_field("pp") if layout.pp > 1 else "pp"
            what = f"{pp} {layout.pp}" if layout.pp > 1 else f"{config_field('microbatches')} {techniques.microbatches}"
            raise ConfigError(f"{what} with {in_parts(name, module, f'leave micro-batches and {pp} out, ')}")
        own = type(module).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward)
        if own and any(getattr(layout, axis) > 1 for axis in AXES):
            raise ConfigError(
                f"{name} is a {class_name(module)}, whose forward is its own: its statistics would be those of each "
                f"rank's samples; use nn.BatchNorm1d, 2d or 3d"
            )


def apply_batch_norm(model: nn.Module, mesh: Mesh, techniques: Techniques, mixed: bool = False) -> None:
    """Have the BatchNorms of `model` normalize over the global batch, in place; where something is recomputed, have
    them count a batch once; in mixed precision, have them compute in float32, whatever the dtype of their weights."""
    groups = [mesh[axis].get_group() for axis in AXES if getattr(mesh.layout, axis) > 1]
    if not (groups or mixed) and techniques.checkpointing == "none":
        return
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.forward = GlobalForward(module, groups)  # type: ignore[method-assign, assignment]


class GlobalForward:
    """The forward of a BatchNorm."""

    def __init__(self, module: BatchNorm, groups: Sequence[dist.ProcessGroup]) -> None:
        self.module, self.groups = module, groups

    def __call__(self, x: Tensor) -> Tensor:
        module, local = self.module, x
        if isinstance(x, DTensor):
            local = x.to_local()
        if not isinstance(module, nn.SyncBatchNorm):
            check_input_dim(module, local)
        wide = local.to(torch.promote_types(local.dtype, torch.float32))
        if module.training or module.running_mean is None:
            mean, variance, count = self._statistics(wide)
            if module.training and module.running_mean is not None and not in_backward():
                self._keep(mean.detach(), variance.detach() * count / (count - 1))
        else:
            assert module.running_var is not None
            mean, variance = to_local(module.running_mean).to(wide), to_local(module.running_var).to(wide)
        shape = (1, -1, *[1] * (wide.ndim - 2))
        result = (wide - mean.view(shape)) * (variance + module.eps).rsqrt().view(shape)
        if module.affine:
            result = result * to_local(module.weight).to(wide.dtype).view(shape)
            result = result + to_local(module.bias).to(wide.dtype).view(shape)
        result = result.to(local.dtype)
        if isinstance(x, DTensor):
            return DTensor.from_local(result, x.device_mesh, x.placements, run_check=False)
        return result

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and the number of elements of each channel, of the global batch."""
        dims = [dim for dim in range(x.ndim) if dim != 1]
        count = x.new_tensor([x.numel() // x.shape[1]])
        sums, count = _Sum.apply(torch.cat((x.sum(dims), count)), self.groups).tensor_split((-1,))
        mean, count = sums / count, count.detach()
        centered = x - mean.view(1, -1, *[1] * (x.ndim - 2))
        return mean, _Sum.apply(centered.square().sum(dims), self.groups) / count, count

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor) -> None:
        module = self.module
        assert module.running_mean is not None
        assert module.running_var is not None
        assert module.num_batches_tracked is not None
        seen = to_local(module.num_batches_tracked).add_(1)
        factor = 1.0 / seen.item() if module.momentum is None else module.momentum
        for running, statistic in ((module.running_mean, mean), (module.running_var, variance)):
            to_local(running).lerp_(statistic.to(running.dtype), factor)
