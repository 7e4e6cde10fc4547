"""Runs one rank's real program with a process group that sends nothing and tensors that have no elements.

::

    with rehearsing(rank, world_size) as rehearsal:
        program()                       # resolve, parallelize, optimizer, steps: all as on the real rank
    rehearsal.memory.peaks()            # rehearsal.traffic has what was sent

The program cannot tell. It takes its rank from the environment, as always. A run takes its process group from what it
talks through (`mmm.run.comm`), which is `DryComm` here. Where the program reads an element of a tensor, it gets a 1, or
zeros. Nothing is written or printed, because a rank of a dry run is never the main one.

Use it in a separate process (`mmm_lab.planner.dry_run` forks one for each rank): PyTorch's caches keep fake tensors.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel as DDP

from mmm.layout import Layout
from mmm.nn import init, weights
from mmm.nn.experts import has_experts
from mmm.parallel import mesh
from mmm.parallel.collective_bytes import Call
from mmm.parallel.mesh import Mesh
from mmm.run.comm import TorchComm, talking_through
from mmm.run.run import Run
from mmm.runtime import ranks
from mmm.runtime.ranks import DRY_RUN_VARIABLE
from mmm.torch_private import dry_run
from mmm.torch_private.fake import FakeTensor, FakeTensorMode, unset_fake_temporarily
from mmm.torch_private.operators import READ_SCALAR, wait_operator
from mmm.torch_private.replace import Place, all_replaced, replaced
from mmm.traffic.count import axis_of_group, count_traffic
from mmm.traffic.dispatch import PlainTensors
from mmm.traffic.operators import axes_of
from mmm_lab.planner.held import NAMES, HeldTensors, coordinate_on
from mmm_lab.planner.rank_numbers import Alike, RankNumber
from mmm_lab.planner.refusals import no_checkpoint, no_other_group, no_pipeline_by_hand, one_model
from mmm_lab.planner.sent_calls import SentInOrder
from mmm_lab.planner.stage_shapes import StageShapes, known_shapes
from mmm_lab.planner.tracker import MemoryTracker, logit_widths
from mmm_launch.contract import RANK_VARIABLES

ATEN = torch.ops.aten
DEVICE = torch.ops.prim.device.default
WAIT = wait_operator()


@dataclass
class Rehearsal:
    """The dry run of one rank.

    Attributes:
        memory: counts the bytes of tensors; None before the run starts, as are traffic and held.
        traffic: has what was sent.
        held: has what the run is, and the shards of its tensors.
        alike: says which ranks run as this one does.
        axes: ranks of a group → its axis.
    """

    rank: int
    world_size: int
    has_experts: bool = False
    memory: MemoryTracker | None = None
    traffic: SentInOrder | None = None
    held: HeldTensors | None = None
    axes: dict[tuple[int, ...], str] = field(default_factory=dict)
    alike: Alike = field(init=False)

    def __post_init__(self) -> None:
        self.alike = Alike(self.rank, self.world_size)

    @functools.cached_property
    def number(self) -> RankNumber:
        """The rank, as a number that knows what it is on the others."""
        return self.alike.number(range(self.world_size))

    @contextmanager
    def group(self, run: Run) -> Iterator[None]:
        """Make a process group that sends nothing, and count what the block computes and sends."""
        clock = run.clock
        layout = run.layout
        job = run.job
        # A script of one's own may have a job without a model.
        model = getattr(job, "model", None)
        self.has_experts = model is not None and has_experts(model)
        self.memory = MemoryTracker(run.device.type, lambda: clock.phase, logit_widths(job, layout))
        self.traffic = SentInOrder(lambda: clock.phase, self.memory.doing)
        self.held = HeldTensors(layout, job, run.device.type, run.precision.name)
        dry_run.register_fake_group()
        dist.init_process_group(
            "fake",
            store=dist.HashStore(),
            rank=self.rank,
            world_size=self.world_size,
        )
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(_changed(self))
            enter(self.held.watching())
            if self.held.stage_sizes:
                enter(
                    known_shapes(
                        StageShapes(
                            job=job,
                            layout=layout,
                            device=run.device,
                            precision=run.precision,
                            memory=self.memory,
                        )
                    )
                )
            enter(_with_memory(lambda: self._begin(enter)))
            yield
        dist.destroy_process_group()

    def _begin(self, enter: Callable[[Any], Any]) -> None:
        """Enter the modes in which tensors have no elements, and their memory is counted.

        Meshes, and the tensors that a model is made from, need elements. They are made before this is called.
        """
        assert self.held is not None
        assert self.memory is not None
        layout = self.held.layout
        ulysses = self.held.techniques.ulysses_size(layout.cp)
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(self.memory.tracking())
        self.axes = axes_of(layout, self.rank, self.has_experts, ulysses)
        enter(count_traffic(traffic=self.traffic, names=self.axes))
        # The mode that is entered last is the first to see an operator.
        enter(_Answers())


class DryComm(TorchComm):
    """What a dry run talks through: there is no other rank."""

    dry = True

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal

    def group(self, run: Run, meet: Callable[[dist.Store], object]) -> AbstractContextManager[None]:
        return self.rehearsal.group(run)

    def gather(self, own: Any) -> list[Any]:
        # Only the main rank gets what was gathered.
        return []

    def broadcast(self, own: Any, source: int = 0) -> Any:
        return own


@contextmanager
def rehearsing(rank: int, world_size: int) -> Iterator[Rehearsal]:
    """Make this process rank `rank` of `world_size` by its environment; a run that the block starts is a dry one."""
    before = dict(os.environ)
    # Variables of a launcher or a scheduler that this process was started by would win.
    for variables in RANK_VARIABLES.values():
        for names in variables:
            for name in names:
                os.environ.pop(name, None)
    os.environ |= {
        DRY_RUN_VARIABLE: "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        # There has to be an address, but nothing connects to it.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    rehearsal = Rehearsal(rank, world_size)
    read_number = ranks.read_number

    def known_on_all_ranks(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
        setting = read_number(env, names)
        if setting is not None and setting[0] == "RANK":
            return "RANK", rehearsal.number
        return setting

    try:
        with (
            replaced(ranks, read_number=known_on_all_ranks),
            talking_through(DryComm(rehearsal)),
            no_other_group(),
        ):
            yield rehearsal
    finally:
        # The program may have set variables, too.
        os.environ.clear()
        os.environ.update(before)


class _Answers(PlainTensors):
    """Answers operators that need not run. A scalar that the host reads is 1, since tensors have no elements."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            # DTensor asks each tensor for its device: more than half of all calls in a run with tp.
            return args[0].fake_device
        if func is WAIT:
            # For fake tensors PyTorch would make a new one, with memory.
            return args[0]
        if func.overloadpacket is READ_SCALAR and isinstance(args[0], FakeTensor):
            if args[0].dtype == torch.bool:
                return True
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs)


def _with_memory(begin: Callable[[], None]) -> AbstractContextManager[None]:
    """Inside, `begin` is called before a model on the meta device first gets memory."""
    # A model on the meta device gets its memory by this method.
    to_empty = torch.nn.Module.to_empty

    def first(module: torch.nn.Module, **kwargs: Any) -> Any:
        torch.nn.Module.to_empty = to_empty  # type: ignore[method-assign]
        begin()
        return module.to_empty(**kwargs)

    return replaced(torch.nn.Module, to_empty=first)


def _changed(rehearsal: Rehearsal) -> AbstractContextManager[None]:
    """Inside, what needs elements or other ranks in PyTorch and in the package is replaced."""
    memory, held, traffic = rehearsal.memory, rehearsal.held, rehearsal.traffic
    assert memory is not None
    assert held is not None
    assert traffic is not None
    changes = (
        *_without_elements(memory, held),
        *_without_ranks(rehearsal, traffic),
        *_uncounted(memory),
        *_known_on_all_ranks(rehearsal, held.layout),
    )
    return all_replaced(changes)


def _without_elements(memory: MemoryTracker, held: HeldTensors) -> Iterator[tuple[Place, Any]]:
    """Replace what reads elements: weights are marked instead of drawn, and NumPy and Python get zeros."""

    def fill_all(tensors: Sequence[tuple[str, torch.Tensor, Any]], *_: Any) -> None:
        memory.mark("parameters", [tensor for _, tensor, _ in tensors])
        held.add((name, tensor) for name, tensor, _ in tensors)

    def drawn(model: torch.nn.Module, *_: Any, **__: Any) -> None:
        memory.mark("parameters", [*model.parameters(), *model.buffers()])
        held.add(model.named_parameters())

    def numpy(tensor: torch.Tensor, **_: Any) -> np.ndarray:
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()

    yield dry_run.module_apply(), one_model(memory)
    yield (dcp, "save"), no_checkpoint
    yield (weights, "initialize"), drawn
    yield (init, "fill_all"), fill_all
    yield (FakeTensor, "numpy"), numpy
    yield (FakeTensor, "tolist"), lambda tensor: numpy(tensor).tolist()
    # It makes a tensor of all ranks, whose elements `DeviceMesh` reads.
    yield (mesh, "init_device_mesh"), _outside_fake_mode(mesh.init_device_mesh)
    if not held.modules:
        yield (PipelineStage, "__init__"), no_pipeline_by_hand
    # DeviceMesh computes groups from a tensor of ranks, whose elements it reads.
    for owner, name in dry_run.mesh_methods():
        yield (owner, name), _outside_fake_mode(vars(owner)[name])


def _known_on_all_ranks(rehearsal: Rehearsal, layout: Layout) -> Iterator[tuple[Place, Any]]:
    """Replace what tells the program its rank by what also knows the other ranks'. PyTorch itself gets an integer."""
    get_rank = dist.get_rank
    get_local_rank = _outside_fake_mode(DeviceMesh.get_local_rank)

    def asked_by_torch() -> bool:
        return sys._getframe(2).f_globals.get("__name__", "").startswith("torch.")

    def rank(group: dist.ProcessGroup | None = None) -> int:
        if group is not None or asked_by_torch():
            return get_rank(group)
        return rehearsal.number

    # Each has a value for every rank: with 100,000 of them they are computed once.
    @functools.cache
    def coordinate(axis: str) -> int:
        return coordinate_on(axis, layout, rehearsal.number)

    def local_rank(mesh: DeviceMesh, mesh_dim: int | str | None = None) -> int:
        own = get_local_rank(mesh, mesh_dim)
        name = mesh_dim
        if not isinstance(name, str):
            name = (mesh.mesh_dim_names or ("",))[name or 0]
        if name not in NAMES or asked_by_torch():
            return own
        return coordinate(name)

    yield (dist, "get_rank"), rank
    yield (DeviceMesh, "get_local_rank"), local_rank


def _without_ranks(rehearsal: Rehearsal, traffic: SentInOrder) -> Iterator[tuple[Place, Any]]:
    """Replace what asks other ranks: all of them answer what this one would."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def noted(operation: str, group: dist.ProcessGroup | None) -> None:
        call = Call(operation, dist.get_world_size(group), dist.get_rank(group), 0)
        traffic.add_uncounted(axis_of_group(group, rehearsal.axes), call)

    def gather(mesh: Mesh, axis: str, value: Any) -> list[Any]:
        return [value] * mesh[axis].size()

    def all_gather_object(objects: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
        noted("all_gather_object", group)
        objects[:] = [own] * len(objects)

    def broadcast(objects: list[Any], src: int | None = None, group: Any = None, **_: Any) -> None:
        noted("broadcast_object_list", group)

    def barrier(group: dist.ProcessGroup | None = None, **_: Any) -> None:
        noted("barrier", group)

    make_group = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        # All ranks make each group, also those that are not in it.
        members = "all" if ranks is None else f"{len(ranks)}, from {min(ranks)} to {max(ranks)}"
        noted(f"new_group (ranks: {members})", None)
        return make_group(ranks, *args, **kwargs)

    # The messages of a pipeline. They are counted, and arrive nowhere.
    batch = dist.batch_isend_irecv

    def sent(ops: list[dist.P2POp]) -> list[Any]:
        return [_Work(work, ops) for work in batch(ops)]

    yield (Mesh, "gather"), gather
    yield (dist, "all_gather_object"), all_gather_object
    yield (dist, "broadcast_object_list"), broadcast
    yield (dist, "barrier"), barrier
    yield (dist, "new_group"), new_group
    yield (dist, "batch_isend_irecv"), sent
    for place in dry_run.ddp_checks():
        yield place, nothing
    yield (DDP, "__init__"), _with_hook(DDP.__init__)
    owner, name = dry_run.ddp_before_forward()
    yield (owner, name), _inside(_WithIntegers, getattr(owner, name))


def _uncounted(memory: MemoryTracker) -> Iterator[tuple[Place, Any]]:
    """Replace what takes memory only in a dry run.

    FSDP makes its chunks for the other ranks too, and DTensor makes full results to learn their shapes.
    """
    yield dry_run.fsdp_chunks(), _Chunks
    # DTensor runs an operator on full tensors to learn the shape of its result.
    owner, name = dry_run.dtensor_shapes()
    yield (owner, name), _inside(memory.paused, vars(owner)[name])


@dataclass(frozen=True)
class _Chunks:
    """The chunks that FSDP makes of each parameter, one for each rank. It takes one or two, which are made then."""

    tensor: torch.Tensor
    count: int
    dim: int

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.tensor.shape[self.dim]
        rows = -(-size // self.count)
        begin = min(index * rows, size)
        # Where rows do not divide, the last ranks have no chunk.
        if begin == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(rows, size - begin))


@dataclass
class _Work:
    """A message under way. As with gloo, it keeps its tensor alive until the program drops the message."""

    work: Any
    ops: Sequence[dist.P2POp]

    def wait(self) -> bool:
        return bool(self.work.wait())


def _with_hook(make: Callable[..., None]) -> Callable[..., None]:
    """Make DDP reduce by a hook.

    DDP's reducer takes the result of an all-reduce from its work object, and a group that sends nothing has none there.
    """

    def reduce(group, bucket):  # type: ignore[no-untyped-def]  # PyTorch compares annotations with classes
        # DDP's gradients are means over the ranks.
        buffer = bucket.buffer().div_(group.size())
        dist.all_reduce(buffer, group=group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    @functools.wraps(make)
    def init(self: DDP, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.register_comm_hook(self.process_group, reduce)
        # A hook of the program would ask the work object as well. What it sends is counted as an all-reduce.
        self.register_comm_hook = lambda state, hook: None  # type: ignore[method-assign]

    return init


class _WithIntegers(PlainTensors):
    """Gives new int32 tensors elements. DDP reads those that say how it has packed its gradients."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is ATEN.empty.memory_format and kwargs.get("dtype") == torch.int32:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _inside(context: Callable[[], AbstractContextManager[Any]], method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called inside of a context."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return inside


def _outside_fake_mode(method: Any) -> Any:
    """A method whose tensors have elements. Meshes compute with tensors of rank numbers."""
    if isinstance(method, (staticmethod, classmethod)):
        return type(method)(_inside(unset_fake_temporarily, method.__func__))
    return _inside(unset_fake_temporarily, method)
