"""FSDP (ZeRO-3): each parameter, its gradient and its optimizer state cut over ``dp_shard``.

A unit's parameters are gathered just for its forward and its backward. With ``dp_replicate`` as well (HSDP) there are
copies of that, kept equal by all-reduce: the gathering stays within a group, ideally on one host. With offload, what is
cut lives in the host's memory (`mmm.parallel.memory.offload`).

Source: Zhao et al., "PyTorch FSDP", 2023; ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

import warnings
import weakref

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from mmm.parallel.plan import Plan, find
from mmm.parallel.ties import join_tied
from mmm.runtime.device import Precision

# Which models keep their parts on the host: `materialize` has to know, and FSDP has no public way to ask.
_OFFLOADED: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def mixed_precision(precision: Precision, root: bool) -> MixedPrecisionPolicy:
    """Compute in ``precision.compute``, reduce gradients in the dtype of the weights.

    Inputs are cast where they enter the model only: inside it, what is wide (rotary angles) is meant to be.
    """
    if not precision.mixed:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=root)


def offload_policy(mesh: DeviceMesh, offload: bool) -> OffloadPolicy:
    """Pinned memory is what an accelerator copies from fastest; without one there is none to pin it for."""
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, plan: Plan, precision: Precision, offload: bool = False) -> None:
    """``fully_shard`` each unit of `fsdp_units_of`, then the model itself, in place.

    Args:
        mesh: (dp_shard,) or (dp_replicate, dp_shard).
        offload: keep what is cut on the host.
    """
    where = offload_policy(mesh, offload)
    # PyTorch warns of any unit whose output is a view, because writing into it would be wrong. No model here does.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for group in fsdp_units_of(model, plan):
        together = group if len(group) > 1 else group[0]
        fully_shard(together, mesh=mesh, mp_policy=mixed_precision(precision, False), offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=mixed_precision(precision, True), offload_policy=where)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _OFFLOADED[model] = offload


def fsdp_units_of(model: nn.Module, plan: Plan) -> list[list[nn.Module]]:
    """The modules of each unit of the plan; units that share a parameter are one."""
    groups: list[list[nn.Module]] = []
    for unit in plan.fsdp_units:
        patterns = (unit,) if isinstance(unit, str) else unit
        modules = [module for pattern in patterns for module in find(model, pattern)]
        groups += [modules] if isinstance(unit, tuple) else [[module] for module in modules]
    return join_tied(model, list(filter(None, groups)))


def is_offloaded(model: nn.Module) -> bool:
    """Whether `apply_fsdp` has put the parts of `model` on the host."""
    return _OFFLOADED.get(model, False)


def widen_gradients(module: nn.Module) -> None:
    """Give all unsharded gradients in `module` the dtype that FSDP sums them in, before it sums those of a unit.

    FSDP widens what is there when the gradient of a unit's input is. Where a schedule splits backward, the gradients of
    some weights come later, in the dtype of compute, and PyTorch 2.13 then refuses the unit.
    """
    for unit in (each for each in module.modules() if isinstance(each, FSDPModule)):
        state = unit._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # before several groups a unit
        for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
            for parameter in group.fsdp_params:
                if not hasattr(parameter, "_unsharded_param"):
                    continue  # never gathered
                parameter.accumulate_unsharded_grad_if_needed()
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
