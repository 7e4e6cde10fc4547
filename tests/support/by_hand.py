"""Collectives with a backward, for programs that shard by hand as frameworks do."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class _Copy(torch.autograd.Function):
    """Nothing forward; backward adds up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """Adds up forward; backward nothing."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Gather(torch.autograd.Function):
    """All of the last dim forward; backward the rank's own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.size = x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(-1, dist.get_rank(ctx.group) * ctx.size, ctx.size).contiguous(), None


class _GatherSummed(torch.autograd.Function):
    """Every rank's tensor along a dim forward; backward the sum over the ranks of this rank's part."""

    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group = group
        ctx.dim = dim
        ctx.size = x.shape[dim]
        parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.size
        return gradient.narrow(ctx.dim, start, ctx.size).contiguous(), None, None


def gather_summed(x, group, dim=0):
    return _GatherSummed.apply(x, group, dim)


def copy(x, group):
    return _Copy.apply(x, group)


def reduce(x, group):
    return _Reduce.apply(x, group)


def gather(x, group):
    return _Gather.apply(x, group)


def average(model, group):
    """The mean of each gradient over a group, as soon as backward has it."""

    def take_mean(parameter):
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(gradient.div_(dist.get_world_size(group)), group=group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take_mean)


def averaged(model, mesh):
    """The mean of each gradient over a mesh of one axis."""
    average(model, mesh.get_group())


def add_up(model, mesh):
    """The sum of each gradient over all ranks."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


def nothing(model, mesh):
    """The program of one device, on each rank."""
