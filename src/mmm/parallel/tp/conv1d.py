"""Matrices kept as (in, out), the transpose of a Linear's: transformers' Conv1D, of which its GPT-2 is made."""

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
    # By its name, because transformers need not be installed.
    names = [cls.__name__ for cls in type(module).__mro__]
    return "Conv1D" in names and hasattr(module, "nf")


def column_dim(module: nn.Module) -> int:
    """The dim of a matrix along which its columns lie: 0 for a Linear, which keeps its matrix transposed, else 1."""
    return int(not isinstance(module, nn.Linear))


def shard_conv1d(module: nn.Module, mesh: DeviceMesh, style: ColwiseParallel | RowwiseParallel) -> None:
    """Shard a Conv1D in place, as `style` shards a Linear."""
    if isinstance(style, RowwiseParallel):
        # Each rank multiplies its columns of the input by its rows of the weight, and has a partial sum of the output.
        input_placement: Placement = Shard(-1)
        output_placement: Placement = Partial()
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Replicate()}
    else:
        # Each rank multiplies the whole input by its columns of the weight, and has these columns of the output.
        input_placement = Replicate()
        output_placement = Shard(-1)
        placements = {"weight": Shard(1), "bias": Shard(0)}
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        sharded = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    prepare_input = PrepareModuleInput(
        input_layouts=style.input_layouts,
        desired_input_layouts=(input_placement,),
    )
    prepare_output = PrepareModuleOutput(
        output_layouts=(output_placement,),
        desired_output_layouts=style.output_layouts,
        use_local_output=style.use_local_output,
    )
    parallelize_module(module, mesh, prepare_input)
    parallelize_module(module, mesh, prepare_output)
