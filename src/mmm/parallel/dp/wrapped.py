"""What is asked of a model that data parallelism has wrapped, by those who do not wrap it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from mmm.torch_private.fsdp import groups_of, state_of


class Wrapper(nn.Module, ABC):
    """A module around a model on the meta device. ``parallel.materialize`` gives that memory and weights, and then
    calls `connect`.

    Attributes:
        module: the model.
        mesh: the ranks that have it, or with tp what tp leaves of it.
    """

    module: nn.Module
    mesh: DeviceMesh

    @abstractmethod
    def connect(self) -> None:
        """Set up the communication, once the parameters have memory and weights. A collective."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a `Wrapper`; any other as it is."""
    return model.module if isinstance(model, Wrapper) else model


def is_offloaded(model: nn.Module) -> bool:
    """Whether FSDP keeps the shards of `model` on the host."""
    return any(parameter.offload_to_cpu for group in all_groups(model) for parameter in group.fsdp_params)


def all_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP's own records of the parameters that it gathers together in `module`."""
    units = (inner for inner in module.modules() if isinstance(inner, FSDPModule))
    for unit in {state_of(unit): unit for unit in units}.values():  # modules of one unit share theirs
        yield from groups_of(unit)
