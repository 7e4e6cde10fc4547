"""Micro-batches: the loss of a batch, some samples at a time.

A pipeline, or a device with little memory, takes a batch in micro-batches. The gradients add up in `.grad`. Samples
have different numbers of targets (-100 is padding), and the loss of the batch is the mean over all of its targets: not
the mean of the micro-batches' means. Only one micro-batch's activations are there at a time: its backward comes before
the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, make_labels

FUNCTION = "accumulate"
TEMPLATE = '''
import torch
import torch.nn.functional as F


def accumulate(model, inputs, targets, microbatches):
    """Call backward once a micro-batch, and return the loss of the batch.

    Args:
        inputs: (samples, tokens, 4), from which the model makes logits (samples, tokens, classes).
        targets: (samples, tokens), -100 where there is none.
        microbatches: number of micro-batches; samples divide over them.
    """
    raise NotImplementedError
'''
MICROBATCHES = 4


@contextmanager
def _in_turns(model: nn.Module, samples: int) -> Iterator[None]:
    """Make `model` raise ValueError where it gets more than `samples`, or a forward before the last one's backward."""
    waits_for_backward = False

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal waits_for_backward
        if len(args[0]) > samples:
            raise ValueError(f"the model is given {len(args[0])} samples at once: a micro-batch has {samples}")
        if waits_for_backward:
            raise ValueError("a forward begins before the backward of the micro-batch before it")
        waits_for_backward = True

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        # Called in backward, when the output's gradient is there.
        output.register_hook(begin_backward)

    def begin_backward(gradient: Tensor) -> None:
        nonlocal waits_for_backward
        waits_for_backward = False

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check(accumulate: Callable[[nn.Module, Tensor, Tensor, int], Tensor]) -> Result:
    """Compare the gradients of the micro-batches with those of the batch, on one rank."""

    def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
        pass

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        inputs, targets = batch
        if mesh is None:
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        with _in_turns(model, len(inputs) // MICROBATCHES):
            return accumulate(model, inputs, targets, MICROBATCHES).detach()

    return verified(FUNCTION, ("dp1",), model_fn=Net, parallelize_fn=nothing, batch_fn=make_labels, step_fn=step)
