"""FSDP (ZeRO-3): each parameter, its gradient and its optimizer state sharded over ``dp_shard``.

A unit's parameters are gathered (an all-gather over dp_shard) only for its forward and its backward; its gradients are
then summed and sharded (a reduce-scatter over dp_shard). Backward begins with the last unit, which therefore stays
gathered between the two (`RESHARD_AFTER_FORWARD`). With ``dp_replicate`` as well (HSDP) there are several replicas of
these shards, kept equal by an all-reduce of the gradients: the all-gathers stay within a group, ideally on one host.

With offload, the shards of parameters, gradients and optimizer state lie in the host's memory, and are updated there. A
step copies gradients to the host, and parameters to the device whenever it gathers them. This saves the device the
shard's parameters, gradients and optimizer state (4 elements a parameter under AdamW); it costs the link to the host,
and an optimizer at the host's speed. Gradients are then CPU tensors. What the ranks sum over them, such as a norm,
goes through the device, because groups of accelerators send nothing from the host.

Sources: Zhao et al., "PyTorch FSDP", 2023; ``torch.distributed.fsdp.fully_shard``; Ren et al., "ZeRO-Offload", 2021;
``torch.distributed.fsdp.CPUOffloadPolicy``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from mmm.torch_private.fsdp import groups_of, pre_backward, shards_version, unsharded_of, widen_gradient
from mmm.torch_private.module import own_parameters
from mmm.torch_private.operators import tree_leaves


def mixed_precision(precision: Precision, root: bool, is_complex: bool = False) -> MixedPrecisionPolicy:
    """A policy to compute in ``precision.compute``, and to reduce gradients in the dtype of the weights.

    Args:
        root: whether this is the model itself. Inputs are cast only where they enter the model: inside it, wide tensors
            (rotary angles) stay wide.
        is_complex: whether the unit's parameters are complex, which have no 16-bit dtype.
    """
    if not precision.mixed or is_complex:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(precision.compute, reduce_dtype=precision.storage, cast_forward_inputs=root)


def offload_policy(mesh: DeviceMesh, offload: bool) -> OffloadPolicy:
    """The policy that keeps shards on the host, or on the device."""
    if not offload:
        return OffloadPolicy()
    # An accelerator copies fastest from pinned memory.
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


# Which units are freed after forward, and gathered again for backward. The root, with what is in no unit, never is.
RESHARD_AFTER_FORWARD: dict[str, slice] = {"auto": slice(-1), "always": slice(None), "never": slice(0)}


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    precision: Precision,
    techniques: Techniques,
) -> None:
    """``fully_shard`` each unit of `fsdp_units_of`, then the model itself, in place.

    Args:
        mesh: (dp_shard,) or (dp_replicate, dp_shard).
    """
    offload = offload_policy(mesh, techniques.offload)
    units = fsdp_units_of(model, plan)
    # Inner modules before the model: each parameter goes with the innermost unit that has it.
    for unit in units:
        policy = mixed_precision(precision, False, _is_complex(unit[0]))
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=policy, offload_policy=offload)
    policy = mixed_precision(precision, True, _is_complex(model))
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed over the ranks: each rank's loss is divided by the global count already.
            module.set_gradient_divide_factor(1.0)
            # Gloo has no scaled sum.
            module.set_force_sum_reduction_for_comms(True)
            module.register_forward_hook(gather_for_backward)  # type: ignore[type-var]
    assert isinstance(model, FSDPModule)
    follow_shards(model)
    refuse_double_backward(model)
    freed = len(units[RESHARD_AFTER_FORWARD[techniques.reshard_after_forward]])
    for unit in units[freed:]:
        for outer in unit:
            for module in outer.modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False, recurse=False)


def apply_expert_fsdp(
    model: nn.Module,
    experts: DeviceMesh,
    plan: Plan,
    precision: Precision,
    offload: bool = False,
) -> None:
    """``fully_shard`` each layer's experts over expert_dp, as FSDP units of their own, in place.

    Args:
        experts: `Mesh.experts`: the ranks of expert_dp have the same experts and different tokens.
        offload: whether to keep the shards on the host.
    """
    ranks = experts["expert_dp"].size()
    axes = tuple(axis for axis in experts.mesh_dim_names or () if axis in ("dp_replicate", "expert_dp"))
    replicas = experts[axes]
    for module in experts_of(model, plan):
        fully_shard(
            module,
            mesh=replicas,
            mp_policy=mixed_precision(precision, False),
            offload_policy=offload_policy(replicas, offload),
            shard_placement_fn=lambda parameter: Shard(expert_dim(parameter, ranks)),
        )


def follow_shards(model: FSDPModule) -> None:
    """Before each forward, have the gathered parameters follow the shards, which ``parameters()`` returns.

    They take over ``requires_grad``. They take over values where FSDP has left a unit gathered (after a forward without
    backward), and an optimizer has made a step since.
    """
    assert isinstance(model, nn.Module)
    # Maps a unit's group to the version of the shards that it was gathered from. `reshard` empties it.
    gathered: dict[Any, int] = {}
    model.gathered_versions = gathered  # type: ignore[assignment]

    def version(group: Any) -> int:
        return shards_version(parameter.sharded_param for parameter in group.fsdp_params)

    def units_and_groups() -> Iterator[tuple[FSDPModule, Any]]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in groups_of(module):
                    yield module, group

    def before(*_: Any) -> None:
        for unit, group in units_and_groups():
            is_stale = group in gathered and gathered[group] != version(group)
            if group.is_unsharded and is_stale:
                unit.reshard()
            for parameter in group.fsdp_params:
                unsharded = unsharded_of(parameter)
                if unsharded is not None:
                    unsharded.requires_grad_(parameter.sharded_param.requires_grad)

    def after(*_: Any) -> None:
        gathered.clear()
        for _unit, group in units_and_groups():
            if group.is_unsharded:
                gathered[group] = version(group)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)


def refuse_double_backward(model: nn.Module) -> None:
    """Have a backward with ``create_graph`` end in a ConfigError: FSDP frees the parameters that a second one needs."""

    def refuse(_: Tensor) -> None:
        refuse_create_graph(
            "a model with data_parallel fsdp",
            "FSDP frees its parameters after the first backward, and a second one (forces, a penalty on gradients) "
            "needs them; use ddp, zero1 or zero2",
        )

    def watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(refuse)

    model.register_forward_hook(watch)


def gather_for_backward(module: FSDPModule, inputs: tuple[Any, ...], output: Any) -> None:
    """A forward hook: have the unit gathered once backward reaches any tensor of its output.

    FSDP itself looks into tuples, lists and dicts (and, in newer versions, dataclasses), but not into other objects.
    """
    if isinstance(output, Tensor) or not torch.is_grad_enabled():
        return
    hooked_by_fsdp = {id(leaf) for leaf in tree_leaves(output)}
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None and id(tensor) not in hooked_by_fsdp:
            tensor.register_hook(pre_backward(module))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of any structure: a tensor, containers of them, objects that have them as attributes."""
    values = [value]
    seen: set[int] = set()
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
    """The modules of each FSDP unit, in the order of the plan.

    Units that share a parameter become one, in the place of the last. FSDP gathers tensors of one dtype together, so
    that a module with complex parameters is a unit of its own, whether the plan names it or not.
    """
    units: list[list[nn.Module]] = []
    for entry in plan.fsdp_units:
        if isinstance(entry, tuple):
            # All modules of a tuple of patterns are one unit.
            units.append([module for pattern in entry for module in find(model, pattern)])
        else:
            # Each module that matches a pattern is a unit of its own.
            units += [[module] for module in find(model, entry)]
    in_units = {id(module) for unit in units for module in unit}
    complex_units = []
    for module in model.modules():
        if module is not model and id(module) not in in_units and _is_complex(module):
            complex_units.append([module])
    # Inner modules first, as `fully_shard` needs them.
    complex_units.reverse()
    return join_tied(model, complex_units + [unit for unit in units if unit])


def _is_complex(module: nn.Module) -> bool:
    """Whether a module has complex parameters of its own, or in a list of parameters inside it, which is never called
    by itself."""
    lists = nn.ParameterList | nn.ParameterDict
    if isinstance(module, lists):
        return False
    owners = [module]
    owners += [child for child in module.children() if isinstance(child, lists)]
    parameters = [parameter for owner in owners for parameter in own_parameters(owner).values()]
    return any(parameter.is_complex() for parameter in parameters if parameter is not None)


def reshard(model: nn.Module) -> None:
    """Free the parameters that are still gathered, such as those that a forward without backward leaves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            # What is gathered from now on is not stale.
            getattr(module, "gathered_versions", {}).clear()


def widen_gradients(module: nn.Module) -> None:
    """Give all unsharded gradients in `module` the dtype that FSDP sums them in, before it sums those of a unit.

    FSDP itself widens the gradients that exist when it has that of a unit's input. Where a schedule splits backward,
    the gradients of some weights come later, in the dtype of compute, and PyTorch 2.13 then refuses the unit.
    """
    for group in all_groups(module):
        for parameter in group.fsdp_params:
            # None: this parameter was never gathered, and has no gradient.
            if unsharded_of(parameter) is not None:
                widen_gradient(parameter)
