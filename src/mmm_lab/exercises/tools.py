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
    """Applies one function to a tensor in forward, and another to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Move, back: Move) -> Tensor:
        ctx.back = back
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _itself(x: Tensor) -> Tensor:
    # Autograd wants another tensor than its input.
    return x.view_as(x)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: the all-reduce writes into it.
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _exchanged(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    # (rows that come, …)
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns `x` itself. Its gradient is added up over the ranks.

    It stands between what all ranks have and what each has a shard of.
    """
    return _Linear.apply(x, _itself, partial(_summed, group=group))


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of `x` over the ranks. Its gradient stays as it is.

    It stands between partial sums and what all ranks have.
    """
    return _Linear.apply(x, partial(_summed, group=group), _itself)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send the rows of `x`: the first ``send[0]`` to rank 0 of the group, the next ``send[1]`` to rank 1, …

    Returns:
        What comes, in the order of the ranks: ``receive[r]`` rows of rank r. Backward sends gradients back.
    """
    forward = partial(_exchanged, send=send, receive=receive, group=group)
    backward = partial(_exchanged, send=receive, receive=send, group=group)
    return _Linear.apply(x, forward, backward)


def shift(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `x` to the next rank of a ring. Returns what the rank before had. Backward goes round the other way."""
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    # All rows go to one rank and come from one.
    rows = x.shape[0]
    send = [0] * size
    send[(rank + 1) % size] = rows
    receive = [0] * size
    receive[(rank - 1) % size] = rows
    return all_to_all(x, send, receive, group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's shard of the sum of a flat tensor over the ranks. Rank 0 has its first elements."""
    ranks = dist.get_world_size(group)
    shards = [shard.contiguous() for shard in x.chunk(ranks)]
    own = torch.empty_like(shards[0])
    dist.reduce_scatter(own, shards, group=group)
    return own


def all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the shards of all ranks, one after another."""
    ranks = dist.get_world_size(group)
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards)


def step_on_shards(
    model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None, shared: Sequence[nn.Parameter]
) -> Tensor:
    """Returns the loss of a rank's shard of the batch. The sum over the ranks is the mean over the batch.

    On ranks it calls backward, and adds up the gradients of `shared`, the parameters that every rank has.
    """
    inputs, targets = batch
    total = F.mse_loss(model(inputs), targets, reduction="sum")
    if mesh is None:
        return total / targets.numel()
    # Of the whole batch: every rank has as many targets.
    loss = total / (targets.numel() * mesh.size())
    loss.backward()
    # Each rank has computed them on its own samples or tokens.
    for parameter in shared:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.get_group())
    return loss


class Block(nn.Module):
    """An MLP with its norm, added to its input: (batch, tokens, 8), in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden)


class Net(nn.Module):
    """Two blocks between two linears: (batch, tokens, 4) → (batch, tokens, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.outlet = nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def make_numbers() -> tuple[Tensor, Tensor]:
    """Make inputs (12, 8, 4) and targets (12, 8, 3): 12 samples of 8 tokens."""
    return torch.randn(12, 8, 4), torch.randn(12, 8, 3)


def make_labels() -> tuple[Tensor, Tensor]:
    """Make inputs (12, 8, 4) and classes (12, 8). Samples end at different tokens: from there on classes are -100."""
    inputs = torch.randn(12, 8, 4)
    targets = torch.randint(3, (12, 8))
    # (samples, 1), from 0 to 7 in another order than the samples': ranks differ in their number of targets.
    last_token = (torch.arange(12)[:, None] * 5) % 8
    is_padding = torch.arange(8) > last_token
    return inputs, targets.masked_fill(is_padding, -100)
