"""All-reduce by hand.

Every rank has a tensor of the same shape, and at the end every rank has the sum of them all. You may send and receive,
and nothing else. One way is a ring: pass on what has come from the rank before, N - 1 times, and add up::

    rank 0 ──► rank 1 ──► rank 2 ──► rank 3 ─┐
       ▲                                     │
       └─────────────────────────────────────┘

Two ranks that both send first, and receive then, wait for each other forever: dist.isend and dist.irecv do not.
The check averages gradients with your function, on 2, 3 and 4 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, make_numbers

FUNCTION = "all_reduce"
TEMPLATE = '''
import torch
import torch.distributed as dist


def all_reduce(x, group):
    """Return the sum of `x` over all ranks of `group`. dist.get_rank(group) and dist.get_world_size(group) say where
    this rank is; group_src= and group_dst= of isend and irecv are numbers within the group."""
    raise NotImplementedError
'''
OTHERS = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "broadcast", "reduce_scatter", "all_to_all")


def check(all_reduce: Callable[[Tensor, dist.ProcessGroup], Tensor]) -> Result:
    """Average gradients over dp by the answer."""

    def forbid(model: nn.Module, mesh: DeviceMesh) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("send and receive alone: no other collective")

        # This rank is a process of its own, which ends after the check.
        for name in OTHERS:
            setattr(dist, name, refuse)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, targets = batch
        loss = F.mse_loss(model(inputs), targets)
        if mesh is None:
            return loss
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = all_reduce(parameter.grad, mesh.get_group()) / mesh.size()
        return loss

    meshes = ("dp2", "dp3", "dp4")
    return verified(FUNCTION, meshes, model_fn=Net, parallelize_fn=forbid, batch_fn=make_numbers, step_fn=step)
