"""What DDP, ZeRO-1 and ZeRO-2 have in common: a replica of the full model on every rank, and when gradients are summed.

Parameters are reduced in parts, always in the same order, whichever a rank's backward reaches first: a part begins when
its gradients are there and all parts before it have begun, and at the end of backward those begin that are left. So the
ranks' collectives are the same where their forwards differ; a parameter that a rank's samples do not use counts as zero
there, and has the gradient zero where no rank's do.

Only what is added to ``.grad`` is summed. Gradients with respect to inputs, and those of ``torch.autograd.grad``, are
this rank's own, unscaled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from mmm.errors import ConfigError
from mmm.parallel.dp.outputs import adds_to_leaves, tensors_in
from mmm.parallel.dp.wrapped import Wrapper
from mmm.runtime.device import Precision
from mmm.torch_private.autograd import at_end_of_backward, in_backward


class Part(ABC):
    """Parameters whose gradients are summed over the ranks by one collective."""

    parameters: Sequence[nn.Parameter]

    @abstractmethod
    def begin(self) -> dist.Work:
        """Begin to sum the gradients over the ranks; one that is missing is zero."""

    @abstractmethod
    def finish(self) -> None:
        """The sum is there: let the optimizer have it."""

    def arrived(self, parameter: nn.Parameter) -> None:  # noqa: B027  # nothing to do, for most
        """Backward has added to the gradient of `parameter`."""


class Replicas(Wrapper):
    """A wrapper around a model of which every rank of `mesh` has a replica, or what tp leaves of one."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.precision = precision
        self.connected = False  # `connect` has run
        self.reduce_now = True
        self._parts: list[Part] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._reducing = False  # a backward is under way whose gradients are summed
        self._missing: list[int] = []  # gradients of each part that this backward has not made yet
        self._begun: list[tuple[Part, dist.Work]] = []
        self._next = 0  # the part to begin next

    def sync_gradients(self, now: bool) -> None:
        """Whether the next backwards sum over the ranks, or only add to this rank's own gradients."""
        self.reduce_now = now

    def reduce_gradients(self) -> None:
        """Sum over the ranks what backwards that do not have left. A collective."""
        self._next = 0
        self._finish()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = self.compute(*inputs, **named)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _, node=tensor.grad_fn: self._entered(node))
        return output

    def compute(self, *inputs: Any, **named: Any) -> Any:
        """The model's own forward, its matrix products in ``precision.compute`` (weights stay as they are)."""
        if not self.connected:
            raise RuntimeError("this model has no weights yet: call parallel.materialize(model, device, seed) first")
        if torch.is_grad_enabled():
            self._before_forward()
        with torch.autocast(self.mesh.device_type, self.precision.compute, enabled=self.precision.mixed):
            return self.module(*inputs, **named)

    def _before_forward(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name} needs a gradient now, and did not when the model was built: its gradients would "
                    f"not be summed over the ranks; build the model with requires_grad, and set it to False afterwards"
                )
        if not in_backward():  # not within a backward: one that has failed leaves its state
            self._reducing = False
            self._begun.clear()

    def _reduce(self, parts: Sequence[Part]) -> None:
        """Sum the gradients of `parts` from now on, in this order."""
        self._parts = list(parts)
        for part_index, part in enumerate(parts):
            for parameter in part.parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, part_index=part_index: self._arrived(part_index, p)
                )
        reduced = {id(parameter) for part in parts for parameter in part.parameters}
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if id(p) not in reduced]

    def _entered(self, output: Node) -> None:
        """A backward has reached an output of the model. It may reach no parameter on this rank."""
        if self.reduce_now and adds_to_leaves(output):
            self._start()

    def _start(self) -> None:
        missing = [sum(p.requires_grad for p in part.parameters) for part in self._parts]
        if self._reducing or not any(missing):
            return
        self._reducing, self._missing, self._next = True, missing, 0
        at_end_of_backward(self._finish)

    def _arrived(self, part_index: int, parameter: nn.Parameter) -> None:
        self._parts[part_index].arrived(parameter)
        if self.reduce_now:
            self._start()
            self._missing[part_index] -= 1
            self._begin(lambda part: self._missing[part] <= 0)

    def _begin(self, ready: Callable[[int], bool]) -> None:
        while self._next < len(self._parts) and ready(self._next):
            part = self._parts[self._next]
            if any(parameter.requires_grad for parameter in part.parameters):
                self._begun.append((part, part.begin()))
            self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward."""
        self._begin(lambda _: True)
        for part, work in self._begun:
            work.wait()
            part.finish()
        self._begun.clear()
        self._reducing = False

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        if self.connected:
            raise RuntimeError("the ranks share this model's memory by now: choose device and dtype before materialize")
        return super()._apply(fn, recurse)
