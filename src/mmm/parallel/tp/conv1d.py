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
    """Whether a module is a Conv1D of transformers: a matrix kept as (in, out), the transpose of a Linear's."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def shard_conv1d(module: nn.Module, mesh: DeviceMesh, style: ColwiseParallel | RowwiseParallel) -> None:
    """What `style` does with a Linear, for a Conv1D; in place."""
    by_rows = isinstance(style, RowwiseParallel)
    weight, bias = (Shard(0), Replicate()) if by_rows else (Shard(1), Shard(0))
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = module.get_parameter(name)
        sharded = nn.Parameter(distribute_tensor(parameter, mesh, [placement]), requires_grad=parameter.requires_grad)
        module.register_parameter(name, sharded)
    wanted: Placement = Shard(-1) if by_rows else Replicate()
    made: Placement = Partial() if by_rows else Shard(-1)
    before = PrepareModuleInput(input_layouts=style.input_layouts, desired_input_layouts=(wanted,))
    after = PrepareModuleOutput(
        output_layouts=(made,), desired_output_layouts=style.output_layouts, use_local_output=style.use_local_output
    )
    parallelize_module(module, mesh, before)
    parallelize_module(module, mesh, after)
