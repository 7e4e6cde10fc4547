"""FSDP (ZeRO-3): each parameter, its gradient and its optimizer state sharded over ``dp_shard``.

A unit's parameters are gathered just for its forward and its backward. Backward begins with the last unit, which
therefore stays gathered between the two (`RESHARD_AFTER_FORWARD`). With ``dp_replicate`` as well (HSDP) there are
replicas of that, kept equal by all-reduce: the all-gathers stay within a group, ideally on one host.

With offload the shards of parameters, gradients and optimizer state live in the host's memory, and are updated there. A
step brings the gradients down, and takes the parameters up whenever it gathers them. It saves 4 elements a parameter
and rank under AdamW, and costs the link to the host and an optimizer at the host's speed. Gradients are then CPU
tensors: what the ranks sum over them, such as a norm, goes by the device, because groups of accelerators send nothing
from the host.

Sources: Zhao et al., "PyTorch FSDP", 2023; ``torch.distributed.fsdp.fully_shard``; Ren et al., "ZeRO-Offload", 2021;
``torch.distributed.fsdp.CPUOffloadPolicy``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from mmm.layout import Techniques
from mmm.parallel.double_backward import refuse_create_graph
from mmm.parallel.dp.wrapped import all_groups
from mmm.parallel.ep.expert_parallel import expert_dim, experts_of
from mmm.parallel.plan import Plan, find
from mmm.parallel.ties import join_tied
from mmm.runtime.device import Precision
from mmm.torch_private.fsdp import groups_of, pre_backward, shards_version, unsharded_of
from mmm.torch_private.module import own_parameters
from mmm.torch_private.operators import tree_leaves


def mixed_precision(precision: Precision, root: bool, is_complex: bool = False) -> MixedPrecisionPolicy:
    """Compute in ``precision.compute``, reduce gradients in the dtype of the weights.

    Inputs are cast only where they enter the model: inside it, wide tensors (rotary angles) stay wide.
    """
    if not precision.mixed or is_complex:  # there is no complex bf16
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=root)


def offload_policy(mesh: DeviceMesh, offload: bool) -> OffloadPolicy:
    """Of shards on the host, or on the device. An accelerator copies fastest from pinned memory."""
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()


# Units that are freed after forward, and gathered again for backward. The root, with what is in no unit, never is.
RESHARD_AFTER_FORWARD: dict[str, slice] = {"auto": slice(-1), "always": slice(None), "never": slice(0)}


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, plan: Plan, precision: Precision, techniques: Techniques) -> None:
    """``fully_shard`` each unit of `fsdp_units_of`, then the model itself, in place.

    Args:
        mesh: (dp_shard,) or (dp_replicate, dp_shard).
    """
    where, units = offload_policy(mesh, techniques.offload), fsdp_units_of(model, plan)
    shard = partial(fully_shard, mesh=mesh, offload_policy=where)
    for group in units:
        shard(group if len(group) > 1 else group[0], mp_policy=mixed_precision(precision, False, _is_complex(group[0])))
    shard(model, mp_policy=mixed_precision(precision, True, _is_complex(model)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            module.register_forward_hook(gather_for_backward)  # type: ignore[type-var]
    assert isinstance(model, FSDPModule)
    follow_shards(model)
    refuse_double_backward(model)
    again = len(units[RESHARD_AFTER_FORWARD[techniques.reshard_after_forward]])
    for module in (inner for group in units[again:] for outer in group for inner in outer.modules()):
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)


def apply_expert_fsdp(
    model: nn.Module, experts: DeviceMesh, plan: Plan, precision: Precision, offload: bool = False
) -> None:
    """``fully_shard`` each layer's experts over expert_dp, as FSDP units of their own, in place.

    Args:
        experts: of `Mesh`. offload: keep the shards on the host.
    """
    ranks = experts["expert_dp"].size()
    over = experts[tuple(axis for axis in experts.mesh_dim_names or () if axis in ("dp_replicate", "expert_dp"))]
    for module in experts_of(model, plan):
        fully_shard(
            module,
            mesh=over,
            mp_policy=mixed_precision(precision, False),
            offload_policy=offload_policy(over, offload),
            shard_placement_fn=lambda parameter: Shard(expert_dim(parameter, ranks)),
        )


def follow_shards(model: FSDPModule) -> None:
    """Have what is gathered follow the shards, which `parameters` has, before each forward: ``requires_grad``, and the
    values where FSDP has left a unit gathered (after a forward without backward) and an optimizer has made a step."""
    assert isinstance(model, nn.Module)
    gathered: dict[Any, int] = {}  # the shards' versions of which a unit is gathered

    def version(group: Any) -> int:
        return shards_version(p.sharded_param for p in group.fsdp_params)

    def each() -> Iterator[tuple[FSDPModule, Any]]:
        units = (module for module in model.modules() if isinstance(module, FSDPModule))
        return ((unit, group) for unit in units for group in groups_of(unit))

    def before(*_: Any) -> None:
        for unit, group in each():
            if group.is_unsharded and gathered.get(group) not in (None, version(group)):
                unit.reshard()
            for p in group.fsdp_params:
                unsharded = unsharded_of(p)
                if unsharded is not None:
                    unsharded.requires_grad_(p.sharded_param.requires_grad)

    def after(*_: Any) -> None:
        gathered.clear()
        gathered.update((group, version(group)) for _, group in each() if group.is_unsharded)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)


def refuse_double_backward(model: nn.Module) -> None:
    """Have a backward with ``create_graph`` end in a ConfigError: FSDP frees the parameters that the second needs."""

    def refuse(_: Tensor) -> None:
        refuse_create_graph(
            "a model with data_parallel fsdp",
            "FSDP frees its parameters after the first backward, and a second one (forces, a penalty on gradients) "
            "needs them; use ddp, zero1 or zero2",
        )

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(refuse)

    model.register_forward_hook(watch)


def gather_for_backward(module: FSDPModule, inputs: tuple[Any, ...], output: Any) -> None:
    """A forward hook: have the unit gathered once backward reaches any tensor of its output. FSDP itself looks into
    tuples, lists and dicts (and, from some version on, dataclasses)."""
    if isinstance(output, Tensor) or not torch.is_grad_enabled():
        return
    seen = {id(leaf) for leaf in tree_leaves(output)}
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None and id(tensor) not in seen:
            tensor.register_hook(pre_backward(module))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value of any structure: a tensor, containers of them, objects that have them as attributes."""
    values, seen = [value], set[int]()
    while values:
        value = values.pop()
        if id(value) in seen or isinstance(value, str | nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple | set):
            values += value
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            values += vars(value).values()


def fsdp_units_of(model: nn.Module, plan: Plan) -> list[list[nn.Module]]:
    """The modules of each unit of the plan, in its order; units that share a parameter are one, in the last's place.
    FSDP gathers one dtype as one: a module that has complex parameters alone is a unit, named or not."""
    groups: list[list[nn.Module]] = []
    for unit in plan.fsdp_units:
        patterns = (unit,) if isinstance(unit, str) else unit
        modules = [module for pattern in patterns for module in find(model, pattern)]
        groups += [modules] if isinstance(unit, tuple) else [[module] for module in modules]
    named = {id(module) for module in (model, *(module for group in groups for module in group))}
    others = [[module] for module in model.modules() if _is_complex(module) and id(module) not in named]
    return join_tied(model, [*reversed(others), *filter(None, groups)])


def _is_complex(module: nn.Module) -> bool:
    """Whether parameters of the module itself are complex, or of a list of parameters in it, which is never called."""
    lists = nn.ParameterList | nn.ParameterDict
    owners = [module, *(child for child in module.children() if isinstance(child, lists))]
    parameters = [p for owner in owners for p in own_parameters(owner).values() if p is not None]
    return not isinstance(module, lists) and any(p.is_complex() for p in parameters)


def reshard(model: nn.Module) -> None:
    """Free what a forward without backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def widen_gradients(module: nn.Module) -> None:
    """Give all unsharded gradients in `module` the dtype that FSDP sums them in, before it sums those of a unit.

    FSDP widens the gradients that are there when it has that of a unit's input. Where a schedule splits backward, those
    of some weights come later, in the dtype of compute, and PyTorch 2.13 then refuses the unit.
    """
    for parameter in (parameter for group in all_groups(module) for parameter in group.fsdp_params):
        if unsharded_of(parameter) is None:
            continue  # never gathered
        parameter.accumulate_unsharded_grad_if_needed()
        if parameter.unsharded_accumulated_grad is None:
            parameter.to_accumulated_grad_if_needed()
