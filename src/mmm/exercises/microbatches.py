"""Micro-batches: the loss of a batch, a part at a time.

A pipeline, or a device with little memory, takes a batch in parts. The gradients add up in `.grad`. Samples have
different numbers of targets (-100 is padding), and the loss of the batch is the mean over all of its targets: not the
mean of the parts' means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.exercises.check import Result, verified
from mmm.exercises.tools import Net, labels

FUNCTION = "accumulate"
TEMPLATE = '''
import torch
import torch.nn.functional as F


def accumulate(model, inputs, targets, microbatches):
    """Call backward once a micro-batch, and return the loss of the batch.

    Args:
        inputs: (samples, tokens, 4), which model takes to logits (samples, tokens, classes).
        targets: (samples, tokens), -100 where there is none. microbatches: how many; samples divide over them.
    """
    raise NotImplementedError
'''
PARTS = 4


def check(accumulate: Callable[[nn.Module, Tensor, Tensor, int], Tensor]) -> Result:
    """On one rank: gradients of the parts beside those of the batch."""

    def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
        pass

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, targets = batch
        if mesh is None:
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        return accumulate(model, inputs, targets, PARTS).detach()

    return verified(FUNCTION, ("dp1",), model_fn=Net, parallelize_fn=nothing, batch_fn=labels, step_fn=step)
