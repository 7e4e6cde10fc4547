"""Micro-batches: the loss of a batch, a part at a time.

A pipeline, or a device with little memory, takes a batch in parts. The gradients add up in `.grad`. Samples have
different numbers of targets (-100 is padding), and the loss of the batch is the mean over all of its targets: not the
mean of the parts' means. The activations of one part are there at a time: its backward comes before the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, labels

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


@contextmanager
def _a_part_at_a_time(model: nn.Module, samples: int) -> Iterator[None]:
    """Raises ValueError where `model` is given more than `samples`, or again before the backward of the last."""
    waiting: list[int] = []

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args[0]) > samples:
            raise ValueError(f"the model is given {len(args[0])} samples at once: a micro-batch has {samples}")
        if waiting:
            raise ValueError("a forward begins before the backward of the micro-batch before it")
        waiting.append(1)

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda gradient: waiting.clear())

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check(accumulate: Callable[[nn.Module, Tensor, Tensor, int], Tensor]) -> Result:
    """On one rank: gradients of the parts beside those of the batch."""

    def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
        pass

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, targets = batch
        if mesh is None:
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        with _a_part_at_a_time(model, len(inputs) // PARTS):
            return accumulate(model, inputs, targets, PARTS).detach()

    return verified(FUNCTION, ("dp1",), model_fn=Net, parallelize_fn=nothing, batch_fn=labels, step_fn=step)
