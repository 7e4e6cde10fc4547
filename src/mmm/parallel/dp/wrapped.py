"""The wrapper that ddp, zero1 and zero2 put around a model, and what other code asks of any model, wrapped or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import Self

from mmm.errors import ConfigError
from mmm.runtime.device import Precision
from mmm.torch_private.fsdp import groups_of, state_of


class Wrapper(nn.Module, ABC):
    """A module around a model on the meta device, of which every rank has a replica, or what tp leaves of one.
    ``parallel.materialize`` gives the model memory and weights, and then calls `connect`.

    Only what is added to ``.grad`` is summed over the ranks. Gradients with respect to inputs, and those that
    ``torch.autograd.grad`` returns, are this rank's own, unscaled.

    Attributes:
        module: the model.
        mesh: the ranks that have a replica of the model.
        precision: data types of weights and of compute.
        connected: whether `connect` has run.
        reduce_now: whether the next backward passes sum over the ranks.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.precision = precision
        self.connected = False
        self.reduce_now = True
        self._frozen: list[tuple[str, nn.Parameter]] = []

    @abstractmethod
    def connect(self) -> None:
        """Set up the communication, once the parameters have memory and weights. A collective."""

    @abstractmethod
    def compute(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's own forward."""

    def sync_gradients(self, now: bool) -> None:
        """Choose whether the next backward passes sum over the ranks, or only add to this rank's own gradients."""
        self.reduce_now = now

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model, with matrix products in ``precision.compute``; weights keep their dtype."""
        if not self.connected:
            raise RuntimeError("this model has no weights yet: call parallel.materialize(model, device, seed) first")
        with torch.autocast(self.mesh.device_type, self.precision.compute, enabled=self.precision.mixed):
            return self.compute(*inputs, **named)

    def sum_gradients_of(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the parameters whose gradients are summed over the ranks. All others have to stay frozen."""
        summed = {id(parameter) for parameter in parameters}
        self._frozen = []
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in summed:
                self._frozen.append((name, parameter))

    def refuse_thawed(self) -> None:
        """Raises ConfigError where a parameter needs a gradient that is not among those that are summed."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name} needs a gradient now, and did not when the model was built: its gradients would "
                    f"not be summed over the ranks; build the model with requires_grad, and set it to False afterwards"
                )

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        if self.connected:
            raise RuntimeError("the ranks share this model's memory by now: choose device and dtype before materialize")
        return super()._apply(fn, recurse)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a `Wrapper`; any other model as it is."""
    if isinstance(model, Wrapper):
        return model.module
    return model


def is_offloaded(model: nn.Module) -> bool:
    """Whether FSDP keeps the shards of `model` on the host."""
    return any(parameter.offload_to_cpu for group in all_groups(model) for parameter in group.fsdp_params)


def all_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP's own groups of parameters in `module`: those of one group are gathered together."""
    # `fully_shard` of several modules makes them one unit: they share its state.
    units: dict[Any, FSDPModule] = {}
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            units[state_of(inner)] = inner
    for unit in units.values():
        yield from groups_of(unit)
