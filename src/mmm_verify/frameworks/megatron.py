"""megatron-core: its process groups, gradients in `main_grad`, and on a host without an accelerator, the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm_verify.adapter import FAULT, Adapter
from mmm_verify.errors import ConfigError
from mmm_verify.observe import parameters_of

# Axes of a mesh, outermost first, in the order in which Megatron numbers its ranks.
AXES = ("pp", "dp", "cp", "tp")


@contextlib.contextmanager
def environment(rank: int, mesh: DeviceMesh | None) -> Iterator[None]:
    """Inside, Megatron's groups are those of the mesh; around the model on one device, there are none.

    Raises:
        ConfigError: the mesh has other axes, or these in another order.
    """
    if mesh is None:
        yield
        return
    names = mesh.mesh_dim_names or ()
    if list(names) != [axis for axis in AXES if axis in names]:
        axes = ", ".join(names)
        raise ConfigError(
            f"{FAULT}megatron numbers ranks by the axes {', '.join(AXES)}, in that order: --mesh has {axes}"
        )
    size = dict(zip(names, mesh.shape, strict=True))
    current_device = torch.cuda.current_device
    if not torch.cuda.is_available():
        # Megatron asks for the device on which it puts its buffers, and takes any answer.
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel(
        size.get("tp", 1), size.get("pp", 1), context_parallel_size=size.get("cp", 1)
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device = current_device


def gradients(program: Any) -> dict[str, Tensor | None]:
    """A parameter's `main_grad` where Megatron's DistributedDataParallel keeps one, else its `grad`."""
    return {name: getattr(parameter, "main_grad", parameter.grad) for name, parameter in parameters_of(program)}


ADAPTER = Adapter(environment=environment, gradients=gradients)
