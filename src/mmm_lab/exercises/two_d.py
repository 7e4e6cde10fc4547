"""Two dimensions: tensor parallel within, FSDP between.

The mesh has the axes dp and tp. Along tp, the ranks share their samples and each MLP's two matrices are sharded:
columns, then rows. Along dp they have other samples, and FSDP shards what tensor parallelism has left of each block.
In which order must the two be applied? Every block should be a unit of FSDP, and the model itself one that takes the
rest.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError
from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import Net, make_numbers

FUNCTION = "shard"
TEMPLATE = '''
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def shard(model, mesh):
    """Shard `model` in place: model.blocks are its blocks, each with the linears `up` and `down` of its MLP."""
    raise NotImplementedError
'''


def check(shard: Callable[[nn.Module, DeviceMesh], None]) -> Result:
    """Shard the model by the answer, and look at how much of each matrix a rank has."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        shard(model, mesh)
        for name, parameter in model.named_parameters():
            if not name.endswith(("up.weight", "down.weight")):
                continue
            # A plain tensor is not sharded at all.
            local = parameter.numel()
            if isinstance(parameter, DTensor):
                local = parameter.to_local().numel()
            expected = parameter.numel() // mesh.size()
            if local > expected:
                raise LayoutError(
                    f"a rank has {local} of the {parameter.numel()} elements of {name}; with {mesh.size()} ranks it "
                    f"should have {expected}"
                )

    return verified(FUNCTION, ("dp2,tp2",), model_fn=Net, parallelize_fn=parallelize, batch_fn=make_numbers)
