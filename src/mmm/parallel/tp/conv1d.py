"""Matrices kept as (in, out), the transpose of a Linear's: the Conv1D of transformers, by which GPT-2 is made."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a Conv1D of transformers."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def column_dim(module: nn.Module) -> int:
    """The dim of a matrix along which its columns lie: a Linear keeps it transposed."""
    return int(not isinstance(module, nn.Linear))


def shard_conv1d(module: nn.Module, mesh: DeviceMesh, style: ColwiseParallel | RowwiseParallel) -> None:
    """What `style` does with a Linear, for a Conv1D; in place."""
    wanted: Placement = Replicate()
    made: Placement = Shard(-1)
    placements: dict[str, Placement] = {"weight": Shard(1), "bias": Shard(0)}
    if isinstance(style, RowwiseParallel):
        wanted = Shard(-1)
        made = Partial()
        placements = {"weight": Shard(0), "bias": Replicate()}
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        sharded = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    parallelize_module(
        module, mesh, PrepareModuleInput(input_layouts=style.input_layouts, desired_input_layouts=(wanted,))
    )
    parallelize_module(
        module,
        mesh,
        PrepareModuleOutput(
            output_layouts=(made,),
            desired_output_layouts=style.output_layouts,
            use_local_output=style.use_local_output,
        ),
    )
