"""Private names of process groups, meshes and DTensor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm.torch_private.operators import C10D, wait_operator
from mmm.torch_private.replace import replaced

# Methods that make a mesh out of others.
# Private: DeviceMesh._concatenate, seen in 2.10 to 2.14. Public replacement: __getitem__, if all went through it.
MESH_MAKERS = [name for name in ("__getitem__", "_concatenate") if name in vars(DeviceMesh)]

# The flight recorders of NCCL (not in builds for the CPU) and of the other backends.
# Private: both names, seen in 2.13. No public replacement.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks.

    Private: distributed_c10d._get_default_group, seen in 2.10 to 2.14. Public replacement: dist.group.WORLD.
    """
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """Return the store by which the ranks have met.

    Private: distributed_c10d._get_default_store, seen in 2.10 to 2.14. Public replacement: the store that
    init_process_group got.
    """
    return dist.distributed_c10d._get_default_store()


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the group of a name, as functional collectives name their group.

    Private: distributed_c10d._resolve_process_group, seen in 2.10 to 2.14. No public replacement.
    """
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_names() -> Mapping[dist.ProcessGroup, str]:
    """Return the groups that this rank is in: group → name.

    Private: distributed_c10d._world, seen in 2.10 to 2.14. Public replacement: ProcessGroup.group_name of each, if
    there were a list of them.
    """
    return dist.distributed_c10d._world.pg_names


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices that a group has backends for.

    Private: ProcessGroup._device_types, seen in 2.10 to 2.14. Public replacement: dist.get_backend_config, as text.
    """
    return group._device_types


def can_split(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group's backend for a device can split groups.

    Private: ProcessGroup._get_backend, seen in 2.10 to 2.14. No public replacement.
    """
    return group._get_backend(device).supports_splitting


def usual_timeout() -> timedelta:
    """Return how long a collective may take in a group of gloo that is made without a timeout.

    Private: distributed_c10d._get_default_timeout, seen in 2.10 to 2.14. No public replacement.
    """
    return dist.distributed_c10d._get_default_timeout(dist.Backend("gloo"))


def default_timeout(limit: timedelta) -> AbstractContextManager[None]:
    """Inside, a process group that is made without a timeout gets this one, whatever its backend.

    The groups of a `DeviceMesh` are made without a timeout, and do not inherit the default group's. Afterwards PyTorch
    can only change it for gloo and nccl: groups of xccl would wait half an hour. Options for each axis
    (``backend_override``) have another class for each backend.

    Private: distributed_c10d._get_default_timeout, seen in 2.10 to 2.14. Public replacement: a timeout of
    init_device_mesh.
    """
    # Every group that is made without a timeout asks this function for it.
    return replaced(dist.distributed_c10d, _get_default_timeout=lambda backend: limit)


def set_timeout(limit: timedelta, group: dist.ProcessGroup) -> None:
    """Give an existing group another timeout.

    Private: distributed_c10d._set_pg_timeout, seen in 2.10 to 2.14, which warns of it. Public replacement:
    dist.set_timeout of 2.14, which is used if this PyTorch has it.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(limit, group)


def flight_recorders() -> Iterator[Any]:
    """Return those functions of `RECORDERS` that this PyTorch has.

    Private: torch._C._distributed_c10d, seen in 2.10 to 2.14. No public replacement.
    """
    from torch._C import _distributed_c10d

    for name in RECORDERS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield dump


def collective_methods() -> list[str]:
    """Return the names of the methods of ``ProcessGroup`` by which torch.distributed calls collectives.

    They are those that take options, such as ``AllreduceOptions``. Some have had other names in other versions.

    Private: the methods of ProcessGroup, seen in 2.10 to 2.14. No public replacement.
    """
    names = []
    for name in dir(dist.ProcessGroup):
        # pybind11 writes the types of arguments into it.
        signature = getattr(dist.ProcessGroup, name).__doc__ or ""
        if "Options" in signature and name != "split_group":
            names.append(name)
    return names


@contextlib.contextmanager
def replaced_wait(
    device: torch.device,
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Inside, functional collectives on a device wait by another function. So do those of compiled graphs, and of C++.

    Args:
        change: function of what waits now that returns what waits instead. It takes and passes on the same arguments.

    Private: the operator _c10d_functional::wait_tensor, seen in 2.10 to 2.14. No public replacement.
    """
    operator = wait_operator()
    # All kinds of device have the same kernel, which looks for the tensor's collective and waits for it. So the kernel
    # that is replaced for one is still there for the others. `redispatch` calls it without Python's global lock: while
    # a rank waits, its other threads go on, such as the one that finds out why it waits for so long.
    other_device = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def wait(tensor: Tensor) -> Any:
        return operator.redispatch(other_device, tensor)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("wait_tensor", change(wait), device.type.upper())
    try:
        yield
    finally:
        library._destroy()


def functional_collectives() -> Any:
    """Return the module whose ``wait_tensor`` all functional collectives use to wait.

    Private: torch.distributed._functional_collectives, seen in 2.10 to 2.14. No public replacement.
    """
    from torch.distributed import _functional_collectives

    return _functional_collectives


def wait_tensor(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective, and return it.

    Private: torch.distributed._functional_collectives.wait_tensor, seen in 2.10 to 2.14. No public replacement.
    """
    return functional_collectives().wait_tensor(tensor)


def all_gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks side by side along a dim. A collective of the group, without a gradient.

    Args:
        x: the same shape on each rank.

    Private: torch.ops._c10d_functional, seen in 2.10 to 2.14. Public replacement: dist.all_gather_into_tensor, which
    torch.compile and the dry run have to see through.
    """
    shards = C10D.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    shards = C10D.wait_tensor(shards)
    if dim == 0:
        return shards
    return torch.cat(shards.chunk(group.size()), dim)


def reduce_scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard along a dim of the sum over the ranks. A collective of the group, without a gradient.

    Args:
        x: a length along `dim` that the ranks divide.

    Private: torch.ops._c10d_functional, seen in 2.10 to 2.14. Public replacement: dist.reduce_scatter_tensor, as above.
    """
    ranks = group.size()
    if dim > 0:
        # What is sent to a rank has to lie together.
        x = torch.cat(x.chunk(ranks, dim))
    shard = C10D.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group.group_name)
    return C10D.wait_tensor(shard)


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks. A collective of the group, without a gradient.

    Private: torch.ops._c10d_functional, seen in 2.10 to 2.14. Public replacement: dist.all_reduce, as above.
    """
    return C10D.wait_tensor(C10D.all_reduce(x.contiguous(), "sum", group.group_name))


def unfinished_type() -> type[Any]:
    """Return the type of a collective's result that has not been waited for. Its method ``trigger_wait`` waits.

    Private: torch.distributed._functional_collectives.AsyncCollectiveTensor, seen in 2.10 to 2.14. No public
    replacement.
    """
    result_type: type[Any] = functional_collectives().AsyncCollectiveTensor
    return result_type


def all_to_all_single_autograd(
    x: Tensor,
    receive: list[int] | None,
    send: list[int] | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Send the rows of `x` to their ranks. The backward sends the rows' gradients back. A collective of the group.

    Args:
        x: rows in the order of the ranks that they are for, (rows, …).
        receive: number of rows from each rank of the group; None: the same number from each.
        send: number of rows to each rank of the group; None: the same number to each.
        group: the ranks that exchange rows.

    Private: torch.distributed._functional_collectives.all_to_all_single_autograd, seen in 2.10 to 2.14. Public
    replacement: torch.distributed.nn.functional.all_to_all_single, which copies to a given output.
    """
    return functional_collectives().all_to_all_single_autograd(x, receive, send, group)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh of one axis that has the ranks of all axes of `mesh`.

    A collective of all ranks of the mesh that `mesh` is a part of: PyTorch makes every group of the new axis.

    Private: DeviceMesh._flatten, seen in 2.10 to 2.14. No public replacement.
    """
    return mesh._flatten(name)


def unflatten(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh that has the axes into which `axis` is split. A collective, as `flatten` is.

    Private: DeviceMesh._unflatten, seen in 2.10 to 2.15. Public replacement: a DeviceMesh of all ranks, with a group
    for the other axes as well. It is used where this PyTorch has no such method.
    """
    if hasattr(mesh, "_unflatten"):
        return mesh[axis]._unflatten(0, sizes, names)
    assert mesh.mesh_dim_names is not None
    # (other axes, axis)
    ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1)
    return DeviceMesh(mesh.device_type, ranks.reshape(-1, *sizes), mesh_dim_names=("others", *names))


def dtensor_like(local: Tensor, like: Any) -> Any:
    """Make a DTensor that has the mesh and placements of `like`. Its local tensor may be on another device than the
    mesh.

    Private: DTensor._spec, seen in 2.10 to 2.14. Public replacement: DTensor.from_local, which copies to the mesh's
    device.
    """
    return type(like)(local, like._spec, requires_grad=False)


def leave_generators_alone(mesh: DeviceMesh) -> None:
    """Keep the first random operator on a `DTensor` from giving all ranks the generator state of rank 0.

    PyTorch would broadcast it to all ranks of the mesh.

    Private: torch.distributed.tensor._random, seen in 2.10 to 2.14. No public replacement.
    """
    from torch.distributed.tensor import _random

    if _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def differentiate_twice(refuse: Callable[[], None]) -> None:
    """Make second derivatives right for a plain tensor that enters sharded modules.

    The ranks' gradients of such a tensor are summed, and PyTorch leaves the sum out of the graph that
    ``create_graph=True`` makes, silently: the second derivative then lacks all modules before it.

    Args:
        refuse: called in such a backward pass. It raises where this PyTorch cannot do it: before 2.13 other operations
            leave the graph as well.

    Private: torch.distributed.tensor._api._FromTorchTensor, seen in 2.13 and 2.14. No public replacement.
    """
    from torch.distributed.tensor import _api

    entering: Any = _api._FromTorchTensor
    if getattr(entering, "differentiates_twice", False):
        return
    original = entering.backward

    def backward(ctx: Any, gradient: Any) -> Any:
        # Without `create_graph`, gradients are disabled in the backward pass.
        if gradient is None or not torch.is_grad_enabled():
            return original(ctx, gradient)
        refuse()
        placements = ctx.grad_placements
        if placements is None:
            placements = _api._normalize_placements_for_grad(ctx.forward_input_placements)
        summed = gradient.redistribute(placements=placements)
        # If a rank's tensor entered as its own summand of a partial sum, its gradient is its own as well: the forward's
        # placements tell.
        local = summed.to_local(grad_placements=ctx.forward_input_placements)
        # `backward` returns one value for each argument of forward; only the tensor has a gradient.
        other_arguments = len(ctx.needs_input_grad) - 1
        return local, *[None] * other_arguments

    entering.backward = staticmethod(backward)
    entering.differentiates_twice = True


def tell_embeddings_apart() -> None:
    """Have DTensor take no Embedding with sharded rows for another one.

    Up to 2.10 its caches ignore the number of rows and the options: a second Embedding has the first one's shape in its
    backward, or waits for the mask that the first one has used.

    Private: DTensor._op_dispatcher, RuntimeSchemaInfo and _MaskPartial, in 2.10 MaskPartial, seen in 2.8 to 2.10. No
    public replacement.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops import _embedding_ops

    propagator = DTensor._op_dispatcher.sharding_propagator  # type: ignore[attr-defined]
    if hasattr(propagator, "op_to_schema_info_for_single_dim_strategy"):
        # 2.11 or newer.
        return
    backward = torch.ops.aten.embedding_dense_backward.default
    # The arguments from the third on are the number of rows, and options.
    propagator.op_to_schema_info[backward] = RuntimeSchemaInfo(2)
    masked: Any = getattr(_embedding_ops, "MaskPartial", None) or _embedding_ops._MaskPartial
    masked.__eq__ = lambda one, other: one is other
    masked.__hash__ = object.__hash__


def ignore_gathers_in_turns() -> None:
    """Silence DTensor's warning that it gathers a tensor which two axes shard in two turns: here that is intended.

    Private: the logger torch.distributed.tensor._redistribute, seen in 2.10 to 2.14. No public replacement.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
