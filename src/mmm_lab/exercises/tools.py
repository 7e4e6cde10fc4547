"""What exercises are given: communication that autograd goes back through, and small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Move = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A function of a tensor, and the one by which its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Move, back: Move) -> Tensor:
        ctx.back = back
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _itself(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _exchanged(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` itself, whose gradient is added up over the ranks: between what all ranks have and what each has part of."""
    return _Linear.apply(x, _itself, partial(_summed, group=group))


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the ranks, whose gradient is left alone: where parts become what all ranks have."""
    return _Linear.apply(x, partial(_summed, group=group), _itself)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of `x`, the first ``send[0]`` to rank 0 of the group, the next ``send[1]`` to rank 1, …; what comes is in
    the order of the ranks, ``receive[r]`` rows of rank r. Backward sends gradients back."""
    there = partial(_exchanged, send=list(send), receive=list(receive), group=group)
    back = partial(_exchanged, send=list(receive), receive=list(send), group=group)
    return _Linear.apply(x, there, back)


def shift(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` goes to the next rank of a ring, and what the rank before had comes. Backward goes round the other way."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    send = [x.shape[0] if other == (rank + 1) % size else 0 for other in range(size)]
    receive = [x.shape[0] if other == (rank - 1) % size else 0 for other in range(size)]
    return all_to_all(x, send, receive, group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of `x` over the ranks: the elements of a flat tensor are dealt out in their order."""
    parts = x.chunk(dist.get_world_size(group))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, [part.contiguous() for part in parts], group=group)
    return own


def all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts, one after the other."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts)


def step_on_parts(
    model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None, shared: Sequence[nn.Parameter]
) -> Tensor:
    """The loss of a rank's part of the batch, whose sum over the ranks is the mean; on ranks with backward, and with
    the gradients of `shared`, which every rank has, added up."""
    inputs, targets = batch
    ranks = 1 if mesh is None else mesh.size()
    loss = F.mse_loss(model(inputs), targets, reduction="sum") / (targets.numel() * ranks)
    if mesh is not None:
        loss.backward()
        add_up_gradients(shared, mesh.get_group())
    return loss


def add_up_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """All-reduce the gradients of parameters that every rank has, each computed on its own part of the samples."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


class Block(nn.Module):
    """An MLP with its norm, around which the input goes on: (batch, tokens, dim), in and out."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two linears: (batch, tokens, 4) → (batch, tokens, 3)."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(4, dim), nn.Linear(dim, 3)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def numbers(batch: int = 12, tokens: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs (batch, tokens, 4) and targets (batch, tokens, 3)."""
    return torch.randn(batch, tokens, 4), torch.randn(batch, tokens, 3)


def labels() -> tuple[Tensor, Tensor]:
    """Inputs (12, 8, 4) and classes (12, 8); samples end at different tokens: -100 from there on."""
    inputs, targets = torch.randn(12, 8, 4), torch.randint(3, (12, 8))
    return inputs, targets.masked_fill(torch.arange(8) > (torch.arange(12)[:, None] * 5) % 8, -100)
