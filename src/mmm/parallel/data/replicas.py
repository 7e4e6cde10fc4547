"""What DDP, ZeRO-1 and ZeRO-2 have in common: a replica of the full model on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from mmm.runtime.device import Precision


class Replicas(nn.Module, ABC):
    """A wrapper around a model of which every rank of `mesh` (one-dimensional) has a replica.

    It is made around a model on the meta device; ``parallel.materialize`` gives that memory and weights, and then calls
    `connect`, which sets up the communication.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.precision = precision
        self.connected = False  # `connect` has run

    @abstractmethod
    def connect(self) -> None:
        """Set up the communication, once the parameters have memory and weights. A collective."""

    @abstractmethod
    def sync_gradients(self, now: bool) -> None:
        """Whether the next backwards sum over the ranks, or only add to this rank's own gradients."""

    def _run(self, *inputs: Any, **named: Any) -> Tensor:
        """The forward of the model."""
        return self.module(*inputs, **named)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The model's own, its matrix products in ``precision.compute`` (weights stay as they are)."""
        if not self.connected:
            raise RuntimeError("this model has no weights yet: call parallel.materialize(model, device, seed) first")
        with torch.autocast(self.mesh.device_type, self.precision.compute, enabled=self.precision.mixed):
            return self._run(*inputs, **named)

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        if self.connected:
            raise RuntimeError("the ranks share this model's memory by now: choose device and dtype before materialize")
        return super()._apply(fn, recurse)
