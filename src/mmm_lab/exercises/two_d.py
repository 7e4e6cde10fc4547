"""Two dimensions: tensor parallel within, FSDP between.

The mesh has the axes dp and tp. Along tp, the ranks share their samples and each MLP's two matrices are sharded:
columns, then rows. Along dp they have other samples, and FSDP shards what tensor parallelism has left of each block.
In which order must the two be applied? Every block is to be a unit of FSDP, and the model itself one that takes the
rest.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError
from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, numbers

FUNCTION = "shard"
TEMPLATE = '''
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def shard(model, mesh):
    """Shard `model` in place: model.blocks are its blocks, each with the linears `up` and `down` of its MLP."""
    raise NotImplementedError
'''


def check(shard: Callable[[nn.Module, DeviceMesh], None]) -> Result:
    """Nothing else is done to the model."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        shard(model, mesh)
        for name, parameter in model.named_parameters():
            local = parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
            if (
                "blocks" in name
                and name.endswith(("up.weight", "down.weight"))
                and local * mesh.size() > parameter.numel()
            ):
                raise LayoutError(
                    f"a rank has {local} of the {parameter.numel()} elements of {name}; with {mesh.size()} ranks it "
                    f"should have {parameter.numel() // mesh.size()}"
                )

    return verified(FUNCTION, ("dp2,tp2",), model_fn=Net, parallelize_fn=parallelize, batch_fn=numbers)
