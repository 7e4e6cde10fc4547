"""Private names of process groups, meshes and DTensor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

# Private: what makes a mesh out of others, seen in 2.10 to 2.14; instead: the first, if all went through it.
MESH_MAKERS = ("__getitem__", "_concatenate")
# Private: the flight recorders of NCCL (not in builds for the CPU) and of the others, seen in 2.13; instead: nothing.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def default_group() -> dist.ProcessGroup:
    """The group of all ranks.

    Private: distributed_c10d._get_default_group, seen in 2.10 to 2.14; instead: dist.group.WORLD."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """The store by which the ranks have met.

    Private: distributed_c10d._get_default_store, seen in 2.10 to 2.14; instead: the store that
    init_process_group got."""
    return dist.distributed_c10d._get_default_store()


def group_of_name(name: str) -> dist.ProcessGroup:
    """The group that a functional collective names.

    Private: distributed_c10d._resolve_process_group, seen in 2.10 to 2.14; instead: nothing."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_names() -> Mapping[dist.ProcessGroup, str]:
    """The groups that this rank is in, with their names.

    Private: distributed_c10d._world, seen in 2.10 to 2.14; instead: ProcessGroup.group_name of each, had it a list."""
    return dist.distributed_c10d._world.pg_names


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices that a group has backends for.

    Private: ProcessGroup._device_types, seen in 2.10 to 2.14; instead: dist.get_backend_config, as text."""
    return group._device_types


def can_split(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group's backend for a device can split groups.

    Private: ProcessGroup._get_backend, seen in 2.10 to 2.14; instead: nothing."""
    return group._get_backend(device).supports_splitting


def usual_timeout(backend: str) -> timedelta:
    """How long a collective may take in a group that is made without a time.

    Private: distributed_c10d._get_default_timeout, seen in 2.10 to 2.14; instead: nothing."""
    return dist.distributed_c10d._get_default_timeout(dist.Backend(backend))


@contextlib.contextmanager
def default_timeout(limit: timedelta) -> Iterator[None]:
    """Inside, a process group that is made without a timeout gets this one, whatever its backend.

    The groups of a `DeviceMesh` are made without one, and do not take over the default group's. Afterwards PyTorch can
    change it for gloo and nccl alone: those of xccl would wait half an hour. Options by axis (``backend_override``) are
    of another class for each backend.

    Private: distributed_c10d._get_default_timeout, seen in 2.10 to 2.14; instead: a timeout of init_device_mesh."""
    c10d = dist.distributed_c10d
    default = c10d._get_default_timeout
    c10d._get_default_timeout = lambda backend: limit
    try:
        yield
    finally:
        c10d._get_default_timeout = default


def set_timeout(limit: timedelta, group: dist.ProcessGroup) -> None:
    """Give a group that is there another timeout.

    Private: distributed_c10d._set_pg_timeout, seen in 2.10 to 2.14, which warns of it; instead: dist.set_timeout, of
    2.14, which is taken where it is there."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(limit, group)


def flight_recorders() -> Iterator[Any]:
    """The functions that this PyTorch has of `RECORDERS`.

    Private: torch._C._distributed_c10d, seen in 2.10 to 2.14; instead: nothing."""
    from torch._C import _distributed_c10d

    for name in RECORDERS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield dump


def functional_collectives() -> Any:
    """The module whose ``wait_tensor`` all functional collectives wait by.

    Private: torch.distributed._functional_collectives, seen in 2.10 to 2.14; instead: nothing."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


def wait_tensor(tensor: Tensor) -> Tensor:
    """The result of a functional collective, once it is there.

    Private: torch.distributed._functional_collectives.wait_tensor, seen in 2.10 to 2.14; instead: nothing."""
    return functional_collectives().wait_tensor(tensor)


def all_to_all_single_autograd(
    x: Tensor, receive: list[int] | None, send: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    """Rows of `x` to their ranks, in backward their gradients the other way.

    Args:
        receive: rows from each rank of the group. None: as many from each.
        send: rows to each.

    Private: torch.distributed._functional_collectives.all_to_all_single_autograd, seen in 2.10 to 2.14; instead:
    torch.distributed.nn.functional.all_to_all_single, which copies to a given output."""
    return functional_collectives().all_to_all_single_autograd(x, receive, send, group)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one.

    Private: DeviceMesh._flatten, seen in 2.10 to 2.14; instead: nothing."""
    return mesh._flatten(name)


def unflatten(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of one axis as several. A collective.

    Private: DeviceMesh._unflatten, seen in 2.13; instead: a DeviceMesh of the ranks, with groups for all axes."""
    return mesh._unflatten(0, sizes, names)


def dtensor_like(local: Tensor, like: Any) -> Any:
    """A DTensor with mesh and placements of another, whose local tensor may be on another device than the mesh.

    Private: DTensor._spec, seen in 2.10 to 2.14; instead: DTensor.from_local, which copies to the mesh's device."""
    return type(like)(local, like._spec, requires_grad=False)


def leave_generators_alone(mesh: DeviceMesh) -> None:
    """Keep the first random operator on a `DTensor` from giving all ranks the generator of rank 0, by a collective of
    all.

    Private: torch.distributed.tensor._random, seen in 2.10 to 2.14; instead: nothing."""
    from torch.distributed.tensor import _random

    if _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def differentiate_twice(refusal: type[Exception]) -> None:
    """Keep the gradient of a plain tensor that enters sharded modules in the graph that ``create_graph=True`` makes.

    Its gradients on the ranks are summed there, and PyTorch leaves the sum out of the graph, silently: the second
    derivative then lacks all of the modules before it.

    Private: torch.distributed.tensor._api._FromTorchTensor, seen in 2.13 and 2.14; instead: nothing.

    Raises:
        refusal: in such a backward, where PyTorch is older than 2.13, whose other parts leave the graph as well.
    """
    from torch.distributed.tensor import _api

    entering: Any = _api._FromTorchTensor
    if getattr(entering, "differentiates_twice", False):
        return
    original = entering.backward

    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None or not torch.is_grad_enabled():  # in a backward: it makes no graph
            return original(ctx, gradient)
        if TorchVersion(torch.__version__) < "2.13":
            raise refusal(
                f"create_graph=True through modules that tp shards: PyTorch {torch.__version__} loses a part of that "
                f"graph; use tp 1, or PyTorch 2.13 or newer"
            )
        placements = ctx.grad_placements
        if placements is None:
            placements = _api._normalize_placements_for_grad(ctx.forward_input_placements)
        # What a rank does with the gradient is its own where the tensor was its own summand.
        local = gradient.redistribute(placements=placements).to_local(grad_placements=ctx.forward_input_placements)
        return local, *[None] * (len(ctx.needs_input_grad) - 1)

    entering.backward = staticmethod(backward)
    entering.differentiates_twice = True


def ignore_gathers_in_turns() -> None:
    """Have DTensor not warn that it gathers a tensor which two axes shard in two turns: here it is meant.

    Private: the logger torch.distributed.tensor._redistribute, seen in 2.10 to 2.14; instead: nothing."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
