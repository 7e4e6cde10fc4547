"""Tensor parallelism: the matrices of a layer cut over the ranks of the tp axis.

``Y = X A``, columns cut (`ColwiseParallel`): each rank has some columns of A and makes some columns of Y, alone.
``Y = X A``, rows cut (`RowwiseParallel`): each rank has some rows of A and the same columns of X, and makes a summand
of Y; the ranks add them up. Columns, then rows, need one sum for two matrices.

Source: Shoeybi et al., "Megatron-LM", 2019; with the sequence cut between: Korthikanti et al., 2022.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from mmm.parallel.plan import Plan, find


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Cut `model` in place over the one-dimensional `mesh`; what the plan names and the model lacks is passed over.

    Module by module, because `parallelize_module` with a plan would take one that has two names twice.
    """
    for pattern, style in plan.tensor.items():
        for module in find(model, pattern):
            parallelize_module(module, mesh, style)
