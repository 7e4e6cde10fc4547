"""Sequence parallel: the gradients of norms.

Tensor-parallel ranks share their samples. Between the matrices each keeps a part of the *tokens* only, so that norms
are computed once and not on every rank. A norm's weight is on every rank, and each rank's backward has seen its own
tokens. So its gradient is a part of what it should be. The loss is the rank's own sum over the count of all tokens::

    tokens 0 … 3 ─ norm ─┐           ┌─ rank 0's part of the gradient
                         ├─ matrices ┤
    tokens 4 … 7 ─ norm ─┘           └─ rank 1's part

The matrices are sharded (DTensors), and their gradients are right already. The parameters of the norms and of the two
linears at the ends are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, numbers

FUNCTION = "sync_gradients"
TEMPLATE = '''
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sync_gradients(model, group):
    """Make the gradients of `model` what they are on one device, after backward, in place.

    Args:
        model: whose parameters are plain tensors, or DTensors where they are sharded. group: the tensor-parallel ranks.
    """
    raise NotImplementedError
'''


def check(sync_gradients: Callable[[nn.Module, Any], None]) -> Result:
    """Tokens are split before the inlet; the answer is called after backward."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        styles = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1)),
        }
        for block in model.blocks:
            parallelize_module(block, mesh, styles)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, targets = batch
        if mesh is None:
            return F.mse_loss(model(inputs), targets)
        rank, size = mesh.get_local_rank(), mesh.size()
        output = model(inputs.chunk(size, dim=1)[rank])
        loss = F.mse_loss(output, targets.chunk(size, dim=1)[rank], reduction="sum") / targets.numel()
        loss.backward()
        sync_gradients(model, mesh.get_group())
        return loss

    return verified(FUNCTION, ("tp2", "tp4"), model_fn=Net, parallelize_fn=parallelize, batch_fn=numbers, step_fn=step)
