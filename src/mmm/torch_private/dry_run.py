"""Private names that a dry run replaces, of process groups without ranks, and of PyTorch's count of memory."""

from __future__ import annotations

from typing import Any

import torch

from mmm.torch_private.replace import Place


def register_fake_group() -> None:
    """Make ``init_process_group("fake")`` create a group that sends nothing, and that also accepts fake tensors.

    Private: torch.testing._internal.distributed.fake_pg and torch.distributed._tools.fake_collectives (the shapes of
    c10d's operators), seen in 2.10 to 2.14. No public replacement.
    """
    # Importing the modules registers the group, and the shapes of its results.
    import torch.distributed._tools.fake_collectives
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def ddp_checks() -> list[Place]:
    """Return the functions by which DDP compares and sends parameters when it is made.

    Private: torch.nn.parallel.distributed's functions, seen in 2.10 to 2.14. Public replacement: DDP's init_sync.
    """
    from torch.nn.parallel import distributed

    return [(distributed, "_verify_param_shape_across_processes"), (distributed, "_sync_module_states")]


def module_apply() -> Place:
    """Return the method by which ``to`` and ``to_empty`` move a module's tensors.

    Private: torch.nn.Module._apply, seen in 2.10 to 2.14. No public replacement.
    """
    return torch.nn.Module, "_apply"


def ddp_before_forward() -> Place:
    """Return the method that DDP calls before each forward.

    Private: DistributedDataParallel._pre_forward, seen in 2.10 to 2.14. No public replacement.
    """
    return torch.nn.parallel.DistributedDataParallel, "_pre_forward"


def fsdp_chunks() -> Place:
    """Return the function by which FSDP splits a parameter: (tensor, count, dim) → one chunk for each rank.

    Private: torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty, seen in 2.10 to 2.14. No public
    replacement.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param, "_chunk_with_empty"


def dtensor_shapes() -> Place:
    """Return the method by which DTensor finds the shape of a full result. It runs the operator on fake tensors.

    Private: torch.distributed.tensor._sharding_prop.ShardingPropagator, seen in 2.10 to 2.14. No public replacement.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def mesh_methods() -> list[Place]:
    """Return the methods of DeviceMesh that compute with tensors of ranks.

    Private: DeviceMesh's methods, seen in 2.10 to 2.14 (those that a version has). No public replacement.
    """
    from torch.distributed.device_mesh import DeviceMesh

    names = ("__init__", "__getitem__", "_flatten", "_create_sub_mesh", "from_group", "get_local_rank", "size")
    return [(DeviceMesh, name) for name in names if name in vars(DeviceMesh)]


def memory_tracker() -> Any:
    """Make PyTorch's tracker of the memory of tensors.

    Private: torch.distributed._tools.mem_tracker.MemTracker, seen in 2.10 to 2.14. No public replacement on the CPU.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker()
