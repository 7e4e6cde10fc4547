"""Sequence parallel: the gradients of norms.

Tensor-parallel ranks share their samples. Between the matrices each keeps only some of the *tokens*, so that norms are
computed once and not on every rank. A norm's weight is on every rank, and each rank's backward has seen only its own
tokens. So its gradient is a partial sum. The loss is the rank's own sum over the count of all tokens::

    tokens 0 … 3 ─ norm ─┐           ┌─ rank 0's term of the gradient
                         ├─ matrices ┤
    tokens 4 … 7 ─ norm ─┘           └─ rank 1's term

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
from mmm_lab.exercises.tools import Net, make_numbers

FUNCTION = "sync_gradients"
TEMPLATE = '''
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sync_gradients(model, group):
    """Make the gradients of `model` what they are on one device, after backward, in place.

    Args:
        model: its parameters are plain tensors, or DTensors where they are sharded.
        group: the tensor-parallel ranks.
    """
    raise NotImplementedError
'''


def check(sync_gradients: Callable[[nn.Module, Any], None]) -> Result:
    """Split the tokens before the inlet, and call the answer after backward."""

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
        # Tokens lie along dim 1.
        local_inputs = inputs.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        local_targets = targets.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        loss = F.mse_loss(model(local_inputs), local_targets, reduction="sum") / targets.numel()
        loss.backward()
        sync_gradients(model, mesh.get_group())
        return loss

    meshes = ("tp2", "tp4")
    return verified(FUNCTION, meshes, model_fn=Net, parallelize_fn=parallelize, batch_fn=make_numbers, step_fn=step)
