"""Private names that a dry run replaces, process groups without ranks, and memory counted by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Place = tuple[Any, str]  # a function of PyTorch's: its owner, and its name there


def register_fake_group() -> None:
    """Have ``init_process_group("fake")`` make a group that sends nothing, also of fake tensors.

    Private: torch.testing._internal.distributed.fake_pg and torch.distributed._tools.fake_collectives (the shapes of
    c10d's operators), seen in 2.10 to 2.14; instead: nothing."""
    import torch.distributed._tools.fake_collectives
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def ddp_checks() -> list[Place]:
    """What DDP compares and sends when it is made.

    Private: torch.nn.parallel.distributed's functions, seen in 2.10 to 2.14; instead: DDP's init_sync."""
    from torch.nn.parallel import distributed

    return [(distributed, "_verify_param_shape_across_processes"), (distributed, "_sync_module_states")]


def module_apply() -> Place:
    """What moves a module's tensors, as ``to`` and ``to_empty`` do.

    Private: torch.nn.Module._apply, seen in 2.10 to 2.14; instead: nothing."""
    return torch.nn.Module, "_apply"


def ddp_before_forward() -> Place:
    """What DDP does before each forward.

    Private: DistributedDataParallel._pre_forward, seen in 2.10 to 2.14; instead: nothing."""
    return torch.nn.parallel.DistributedDataParallel, "_pre_forward"


def fsdp_chunks() -> Place:
    """How FSDP splits a parameter: (tensor, count, dim) → a chunk a rank.

    Private: torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty, seen in 2.10 to 2.14; instead:
    nothing."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param, "_chunk_with_empty"


def dtensor_shapes() -> Place:
    """How DTensor finds the shape of a full result: by running the operator on fake tensors.

    Private: torch.distributed.tensor._sharding_prop.ShardingPropagator, seen in 2.10 to 2.14; instead: nothing."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def mesh_methods() -> list[Place]:
    """What computes with tensors of ranks.

    Private: DeviceMesh's methods, seen in 2.10 to 2.14 (those that a version has); instead: nothing."""
    from torch.distributed.device_mesh import DeviceMesh

    names = ("__init__", "__getitem__", "_flatten", "_create_sub_mesh", "from_group", "get_local_rank", "size")
    return [(DeviceMesh, name) for name in names if name in vars(DeviceMesh)]


def memory_tracker() -> Any:
    """PyTorch's tracker of the memory of tensors.

    Private: torch.distributed._tools.mem_tracker.MemTracker, seen in 2.10 to 2.14; instead: nothing on the CPU."""
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker()


@contextmanager
def peaks_by_phase(phase: Callable[[], str]) -> Iterator[dict[str, int]]:
    """Inside, the most bytes of all tensors of the CPU in each phase, as PyTorch's tracker counts them: without its
    hooks on modules, which pipelines do not go with.

    Private: MemTracker's methods and attributes, seen in 2.10 to 2.14, _fake_mode_on_entry from 2.13 on; instead:
    nothing."""
    tracker, cpu, peaks = memory_tracker(), torch.device("cpu"), dict[str, int]()

    def update(state: Any) -> None:
        size = tracker._curr_mem_snap.get(cpu, {}).get("Total", 0)
        peaks[phase()] = max(size, peaks.get(phase(), 0))

    tracker._update_peak_stats = update
    tracker._fake_mode_on_entry = None
    tracker._track_resize()
    TorchDispatchMode.__enter__(tracker)
    try:
        yield peaks
    finally:
        tracker._restore_resize()
        TorchDispatchMode.__exit__(tracker, None, None, None)
