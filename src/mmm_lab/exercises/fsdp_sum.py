"""The loss under FSDP: averages of averages.

Each data-parallel rank has samples of its own, with a different number of targets (-100 is padding). FSDP *averages*
the gradients over the ranks. The loss of one device is the mean over all targets of the batch. What does each rank have
to return, so that the averaged gradients are those of one device?

dist.all_reduce adds up a tensor over the ranks in place; a count needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, make_labels

FUNCTION = "local_loss"
TEMPLATE = '''
import torch
import torch.distributed as dist
import torch.nn.functional as F


def local_loss(logits, targets, group):
    """Return this rank's loss, a scalar to call backward on.

    Args:
        logits: (tokens, classes).
        targets: (tokens,), -100 where there is none.
        group: the data-parallel ranks.
    """
    raise NotImplementedError
'''


def check(local_loss: Callable[[Tensor, Tensor, Any], Tensor]) -> Result:
    """Apply FSDP over dp, as it is, with the answer's loss."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        # The blocks first: the model's unit takes what is left.
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, labels = batch
        logits = model(inputs).flatten(0, 1)
        targets = labels.flatten()
        if mesh is None:
            return F.cross_entropy(logits, targets)
        return local_loss(logits, targets, mesh.get_group())

    meshes = ("dp2", "dp4")
    return verified(FUNCTION, meshes, model_fn=Net, parallelize_fn=parallelize, batch_fn=make_labels, step_fn=step)
