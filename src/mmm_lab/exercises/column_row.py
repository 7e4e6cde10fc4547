"""Columns, then rows: an MLP over tensor-parallel ranks.

Each rank has some columns of the first matrix, with their part of the bias, and the same rows of the second; the second
bias is on every rank. With the columns it computes hidden units of its own, and with the rows a part of the sum that
the MLP returns. Two functions are given. ``enter(x, group)`` is x itself, and backward adds its gradient up over the
ranks. ``leave(x, group)`` is the sum over the ranks, and backward leaves its gradient alone::

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
from mmm_lab.exercises.tools import Block, Net, numbers

FUNCTION = "mlp"
TEMPLATE = '''
import torch
import torch.nn.functional as F

from mmm_lab.exercises.tools import enter, leave


def mlp(x, w1, b1, w2, b2, group):
    """Return down(tanh(up(x))), the same on every rank.

    Args:
        x: (batch, tokens, dim), the same on every rank. w1: (hidden / ranks, dim), b1: (hidden / ranks,) of `up`.
        w2: (dim, hidden / ranks) of `down`. b2: (dim,), all of it.
    """
    raise NotImplementedError
'''


class _Sharded(Block):
    """A block whose matrices are sharded, and whose MLP is the answer's."""

    def __init__(self, block: Block, mesh: DeviceMesh, mlp: Callable[..., Tensor]) -> None:
        nn.Module.__init__(self)
        rank, size = mesh.get_local_rank(), mesh.size()
        self.norm, self.up, self.down = block.norm, block.up, block.down
        self.up.weight = nn.Parameter(block.up.weight.detach().chunk(size)[rank].clone())
        self.up.bias = nn.Parameter(block.up.bias.detach().chunk(size)[rank].clone())
        self.down.weight = nn.Parameter(block.down.weight.detach().chunk(size, dim=1)[rank].clone())
        self.group, self.mlp = mesh.get_group(), mlp

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        return x + self.mlp(self.norm(x), up.weight, up.bias, down.weight, down.bias, self.group)


def check(mlp: Callable[..., Tensor]) -> Result:
    """Both blocks' MLPs are the answer's."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        model.blocks = nn.ModuleList([_Sharded(block, mesh, mlp) for block in model.blocks if isinstance(block, Block)])
        torch.distributed.barrier()

    return verified(FUNCTION, ("tp2", "tp4"), model_fn=Net, parallelize_fn=parallelize, batch_fn=numbers)
