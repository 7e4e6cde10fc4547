"""Columns, then rows: an MLP over tensor-parallel ranks.

Each rank has some columns of the first matrix, with their shard of the bias, and the same rows of the second. The
second bias is on every rank. With the columns a rank computes hidden units of its own, and with the rows a term of the
sum that the MLP returns. Two functions are given. ``enter(x, group)`` is x itself, and backward adds its gradient up
over the ranks. ``leave(x, group)`` is the sum over the ranks, and backward leaves its gradient as it is::

    x ─ enter ─┬─► columns ─► tanh ─► rows ─┬─ leave ─► y
               └─► columns ─► tanh ─► rows ─┘

Each is needed once, and the second bias has to be in y once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Block, Net, make_numbers

FUNCTION = "mlp"
TEMPLATE = '''
import torch
import torch.nn.functional as F

from mmm_lab.exercises.tools import enter, leave


def mlp(x, w1, b1, w2, b2, group):
    """Return down(tanh(up(x))), the same on every rank.

    Args:
        x: (batch, tokens, dim), the same on every rank.
        w1, b1: (hidden / ranks, dim) and (hidden / ranks,), this rank's shards of `up`.
        w2: (dim, hidden / ranks), this rank's shard of `down`.
        b2: (dim,), the whole bias of `down`.
    """
    raise NotImplementedError
'''


class _Sharded(Block):
    """A block whose matrices are sharded, and whose MLP is the answer's."""

    def __init__(self, block: Block, mesh: DeviceMesh, mlp: Callable[..., Tensor]) -> None:
        # It takes the modules of `block`, and makes none of its own.
        nn.Module.__init__(self)
        self.norm = block.norm
        self.up = block.up
        self.down = block.down
        self.group = mesh.get_group()
        self.mlp = mlp

        def shard(weight: Tensor, dim: int) -> nn.Parameter:
            shards = weight.detach().chunk(mesh.size(), dim=dim)
            return nn.Parameter(shards[mesh.get_local_rank()].clone())

        # A linear's weight is (out, in): the matrix's columns lie along dim 0, its rows along dim 1.
        self.up.weight = shard(self.up.weight, 0)
        self.up.bias = shard(self.up.bias, 0)
        self.down.weight = shard(self.down.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.mlp(hidden, self.up.weight, self.up.bias, self.down.weight, self.down.bias, self.group)


def check(mlp: Callable[..., Tensor]) -> Result:
    """Compute both blocks' MLPs by the answer."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        blocks = [_Sharded(block, mesh, mlp) for block in model.blocks if isinstance(block, Block)]
        model.blocks = nn.ModuleList(blocks)
        # No rank begins before all have their shards.
        torch.distributed.barrier()

    return verified(FUNCTION, ("tp2", "tp4"), model_fn=Net, parallelize_fn=parallelize, batch_fn=make_numbers)
