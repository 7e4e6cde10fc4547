"""Ring attention: a sequence that is too long for one device.

Each rank has the queries, keys and values of its own shard of the sequence, in the order of the ranks. Keys and values
go round a ring, and each rank's queries meet them all, a shard at a time. Attention is causal: a token sees itself and
those before it, whatever rank they are on. A softmax over all keys can be put together from those over each shard, if
each is kept with its largest score, or its log-sum-exp::

    rank 1:   queries 4 … 7   meet   keys 4 … 7,  then 0 … 3        softmax over both, not two softmaxes
                                     (its own)    (from rank 0)

``shift(x, group)`` is given: `x` goes to the next rank, and what the rank before had comes back; so does backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import make_numbers, step_on_shards

FUNCTION = "attention"
TEMPLATE = '''
import torch
import torch.distributed as dist

from mmm_lab.exercises.tools import shift


def attention(q, k, v, group):
    """Return what causal attention over the whole sequence gives this rank's queries: (batch, heads, tokens, head_dim).

    Args:
        q, k, v: (batch, heads, tokens, head_dim) of this rank's tokens. Scores are q·k / sqrt(head_dim). With the batch
            at dim 0, `shift` takes k and v as they are.
        group: the ranks, in the order of the sequence.
    """
    raise NotImplementedError
'''


class Attention(nn.Module):
    """Attention with two heads: (batch, tokens, 4) → (batch, tokens, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 8)
        self.k = nn.Linear(4, 8)
        self.v = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)
        self.attend: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        # (batch, heads, tokens, head_dim)
        q, k, v = (linear(x).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.attend is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def check(attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor]) -> Result:
    """Split the sequence over cp, and add up the gradients over its ranks."""

    def parallelize(model: Attention, mesh: DeviceMesh) -> None:
        model.attend = lambda q, k, v: attention(q, k, v, mesh.get_group())

    def local_batch(batch: tuple[Tensor, Tensor], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        # Tokens lie along dim 1.
        return tuple(tensor.chunk(mesh.size(), dim=1)[mesh.get_local_rank()] for tensor in batch)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        return step_on_shards(model, batch, mesh, list(model.parameters()))

    return verified(
        FUNCTION,
        ("cp2", "cp4"),
        model_fn=Attention,
        parallelize_fn=parallelize,
        batch_fn=make_numbers,
        step_fn=step,
        local_batch_fn=local_batch,
    )
