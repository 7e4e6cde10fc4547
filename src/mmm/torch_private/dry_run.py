"""Private names that a dry run replaces, of process groups without ranks, and of PyTorch's count of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A function of PyTorch's: the class or module that has it, and its name there.
Place = tuple[Any, str]


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


@contextmanager
def peaks_by_phase(phase: Callable[[], str]) -> Iterator[dict[str, int]]:
    """Inside, count the most bytes that all tensors on the CPU take in each phase, with PyTorch's tracker.

    Yields phase → bytes. The tracker's hooks on modules are left out, because they do not work with pipelines.

    Args:
        phase: function that names the phase that is running.

    Private: MemTracker's methods and attributes, seen in 2.10 to 2.14, _fake_mode_on_entry from 2.13 on. No public
    replacement.
    """
    tracker = memory_tracker()
    cpu = torch.device("cpu")
    peaks: dict[str, int] = {}

    def update(state: Any) -> None:
        size = tracker._curr_mem_snap.get(cpu, {}).get("Total", 0)
        peaks[phase()] = max(size, peaks.get(phase(), 0))

    # The tracker calls this after each change of the memory.
    tracker._update_peak_stats = update
    tracker._fake_mode_on_entry = None
    tracker._track_resize()
    # `MemTracker.__enter__` would set its hooks on modules: only the dispatch mode is entered.
    TorchDispatchMode.__enter__(tracker)
    try:
        yield peaks
    finally:
        tracker._restore_resize()
        TorchDispatchMode.__exit__(tracker, None, None, None)
