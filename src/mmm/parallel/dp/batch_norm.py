"""Batch normalization over the global batch: sums over all ranks that have other samples, on any device.

The mathematics is that of ``nn.SyncBatchNorm``, which PyTorch has only for accelerators. The statistics that a model
keeps for evaluation are those of the global batch as well, and so the same on every rank.

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
from mmm.nn.init import class_name
from mmm.parallel.dp.microbatches import batch_norms, why_no_microbatches
from mmm.parallel.local import to_local
from mmm.parallel.mesh import Mesh
from mmm.torch_private.autograd import in_backward
from mmm.torch_private.module import BatchNorm, check_input_dim

# Axes whose ranks have different samples, or different places of the same samples.
AXES = ("dp_replicate", "dp_shard", "cp")
# The forwards that `GlobalForward` replaces.
FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


class GlobalSum(torch.autograd.Function):
    """The sum over the ranks of all `groups`, reduced over one group after the other.

    Backward sums too: every rank's loss depends on the sum, and the global loss is the sum of the ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:  # type: ignore[override]
        ctx.groups = groups
        total = x.contiguous().clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return GlobalSum.apply(gradient, ctx.groups), None


def check_batch_norm(model: nn.Module, layout: Layout, techniques: Techniques) -> None:
    """Check that batch normalization can be over the global batch. Needs no process group.

    Raises:
        ConfigError: there are micro-batches or a pipeline; or a module is of a class derived from PyTorch's, with a
            forward of its own.
    """
    for name, module in batch_norms(model):
        microbatches = techniques.microbatches or 1
        if layout.pp > 1 or microbatches > 1:
            if layout.pp > 1:
                pp = config_field("pp")
                cause = f"{pp} {layout.pp}"
            else:
                pp = "pp"
                cause = f"{config_field('microbatches')} {microbatches}"
            advice = f"leave micro-batches and {pp} out, "
            raise ConfigError(f"{cause} with {why_no_microbatches(name, module, advice)}")
        has_own_forward = type(module).forward not in FORWARDS
        is_split = any(getattr(layout, axis) > 1 for axis in AXES)
        if has_own_forward and is_split:
            raise ConfigError(
                f"{name} is a {class_name(module)}, whose forward is its own: its statistics would be those of each "
                f"rank's samples; use nn.BatchNorm1d, 2d or 3d"
            )


def apply_batch_norm(
    model: nn.Module,
    mesh: Mesh,
    techniques: Techniques,
    mixed: bool = False,
) -> None:
    """Have the BatchNorms of `model` normalize over the global batch, in place.

    With activation checkpointing they also count a batch once, although its forward is recomputed. In mixed precision
    they compute in float32, whatever the dtype of their weights.
    """
    groups = []
    for axis in AXES:
        if getattr(mesh.layout, axis) > 1:
            groups.append(mesh[axis].get_group())
    if not groups and not mixed and techniques.checkpointing == "none":
        return
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.forward = GlobalForward(module, groups)  # type: ignore[method-assign, assignment]


class GlobalForward:
    """The forward of a BatchNorm, over the samples of all ranks in `groups`."""

    def __init__(self, module: BatchNorm, groups: Sequence[dist.ProcessGroup]) -> None:
        self.module = module
        self.groups = groups

    def __call__(self, x: Tensor) -> Tensor:
        """
        Args:
            x: (batch, channels, …), this rank's samples.

        Returns:
            The same shape and dtype.
        """
        module = self.module
        local = x
        if isinstance(x, DTensor):
            # Under tp, the channels of this rank.
            local = x.to_local()
        if not isinstance(module, nn.SyncBatchNorm):
            check_input_dim(module, local)
        wide_dtype = torch.promote_types(local.dtype, torch.float32)
        wide = local.to(wide_dtype)
        if module.training or module.running_mean is None:
            dims = [dim for dim in range(wide.ndim) if dim != 1]
            mean, variance, count = global_statistics(wide, dims, self.groups)
            # A forward that is recomputed in backward must not count its batch a second time.
            if module.training and module.running_mean is not None and not in_backward():
                # Running statistics are unbiased, as PyTorch keeps them.
                unbiased = variance.detach() * count / (count - 1)
                self._keep(mean.detach().flatten(), unbiased.flatten())
        else:
            assert module.running_var is not None
            mean = to_local(module.running_mean).to(wide)
            variance = to_local(module.running_var).to(wide)
        shape = _broadcast_shape(wide)
        inverse_std = (variance + module.eps).rsqrt()
        result = (wide - mean.view(shape)) * inverse_std.view(shape)
        if module.affine:
            weight = to_local(module.weight).to(wide.dtype)
            bias = to_local(module.bias).to(wide.dtype)
            result = result * weight.view(shape)
            result = result + bias.view(shape)
        result = result.to(local.dtype)
        if isinstance(x, DTensor):
            return DTensor.from_local(result, x.device_mesh, x.placements, run_check=False)
        return result

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        module = self.module
        assert module.running_mean is not None
        assert module.running_var is not None
        assert module.num_batches_tracked is not None
        batches = to_local(module.num_batches_tracked).add_(1)
        factor = module.momentum
        if factor is None:
            # PyTorch's meaning of no momentum: the plain average over all batches so far.
            factor = 1.0 / batches.item()
        for running, statistic in ((module.running_mean, mean), (module.running_var, variance)):
            to_local(running).lerp_(statistic.to(running.dtype), factor)


def _broadcast_shape(x: Tensor) -> tuple[int, ...]:
    """(1, channels, 1, …): the shape of statistics that broadcast over the samples and places of x."""
    places = x.ndim - 2
    return (1, -1, *[1] * places)


def global_statistics(
    x: Tensor,
    dims: list[int],
    groups: Sequence[dist.ProcessGroup],
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and number of elements over `dims` and all ranks. A collective of all `groups`.

    Returns:
        (…), (…) and (1,), in which `dims` have length 1.
    """
    # Of this rank. One operator, which keeps nothing for backward but x.
    local_variance, local_mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    if not x.numel():
        # A rank without samples adds nothing. The mean of nothing would be NaN.
        local_variance = local_mean = x.sum(dims, keepdim=True)
    local_count = x.new_tensor([x.numel() // local_mean.numel()])
    # One all-reduce for both. Ranks may have different numbers of samples, or places.
    local_sums = torch.cat(((local_mean * local_count).flatten(), local_count))
    total = GlobalSum.apply(local_sums, groups)
    sums, count = total.tensor_split((-1,))
    mean = sums.view(local_mean.shape) / count
    count = count.detach()
    # A second all-reduce, of squared distances from the global mean: more exact than a mean of squares.
    local_squares = (local_variance + (local_mean - mean).square()) * local_count
    variance = GlobalSum.apply(local_squares, groups) / count
    return mean, variance, count
