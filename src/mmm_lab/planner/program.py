"""One rank's real program, on nothing: a process group that sends nothing, and tensors that have no elements.

::

    with rehearsing(rank, world_size) as rehearsal:
        program()                       # resolve, parallelize, optimizer, steps: all as on the real rank
    rehearsal.peaks()                   # memory; rehearsal.traffic has what was sent

The program does not know. Its rank comes from the environment, as always; a run takes its process group from what
it talks through (`mmm.run.comm`), which is this one; and where the program reads an element of a tensor, it gets a 1,
or zeros. Nobody writes or prints: a rank of a dry run is never the main one.

Only for a process of its own (`mmm_lab.planner.dry_run` forks one a rank): PyTorch's caches keep what was made here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from mmm.nn import draw, weights
from mmm.nn.experts import has_experts
from mmm.parallel.mesh import Mesh
from mmm.run.comm import TorchComm, talking_through
from mmm.run.run import Run
from mmm.runtime.contract import DRY_RUN_VARIABLE, RANK_VARIABLES
from mmm.torch_private import dry_run
from mmm.torch_private.dry_run import Place
from mmm.torch_private.fake import FakeTensor, FakeTensorMode, unset_fake_temporarily
from mmm.torch_private.operators import READ_SCALAR, TorchDispatchMode, wait_operator
from mmm.traffic.count import count_traffic
from mmm.traffic.operators import axes_of
from mmm_lab.planner.held import HeldTensors
from mmm_lab.planner.refusals import no_checkpoint, no_other_group, one_model
from mmm_lab.planner.sent_calls import SentInOrder
from mmm_lab.planner.stage_shapes import StageShapes, known_shapes
from mmm_lab.planner.tracker import MemoryPeak, MemoryTracker, logit_widths

ATEN = torch.ops.aten
DEVICE = torch.ops.prim.device.default
WAIT = wait_operator()


@dataclass
class Rehearsal:
    """The dry run of one rank.

    Attributes:
        device, precision: of the run, once it has started. stages: of a pipeline, by coordinate on pp, the elements of
            the parameters of its ranks; empty without.
        memory, traffic, held: once it has started.
    """

    rank: int
    world_size: int
    device: torch.device | None = None
    precision: str = ""
    has_experts: bool = False
    stages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    memory: MemoryTracker | None = None
    traffic: SentInOrder | None = None
    held: HeldTensors | None = None

    @contextmanager
    def group(self, run: Run) -> Iterator[None]:
        """In place of the run's process group: one that sends nothing. What the block computes and sends is counted."""
        clock = run.clock
        layout = run.layout
        precision = run.precision
        resolved = run.job
        device = run.device
        self.device = device
        self.precision = precision.name
        model = getattr(resolved, "model", None)
        partition = getattr(resolved, "partition", None)
        self.has_experts = model is not None and has_experts(model)
        self.notes = getattr(resolved, "notes", ())
        if partition is not None and partition.stages:
            self.stages = partition.parameters(model, layout.pp, resolved.techniques.schedule)
        self.memory = MemoryTracker(device.type, lambda: clock.phase, logit_widths(resolved, layout))
        self.traffic = SentInOrder(lambda: clock.phase, self.memory.doing)
        self.held = HeldTensors(layout, resolved)
        dry_run.register_fake_group()
        dist.init_process_group("fake", store=dist.HashStore(), rank=self.rank, world_size=self.world_size)
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(_changed(self.memory, self.held))
            enter(self.held.watching())
            if partition is not None and partition.stages:
                enter(known_shapes(StageShapes(resolved, layout, device, precision, self.memory)))
            enter(_with_memory(lambda: self._begin(enter)))
            yield
        dist.destroy_process_group()

    def _begin(self, enter: Callable[[Any], Any]) -> None:
        """From here on tensors have memory, which is counted, and no elements. Meshes and what a model is made of need
        elements, and no memory: they come before."""
        assert self.held is not None
        assert self.memory is not None
        layout = self.held.layout
        ulysses = self.held.techniques.ulysses_size(layout.cp)
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(self.memory.tracking())
        names = axes_of(layout, self.rank, self.has_experts, ulysses)
        enter(count_traffic(traffic=self.traffic, names=names))
        enter(_Answers())  # the mode entered last is the first to see an operator

    def peaks(self) -> dict[str, MemoryPeak]:
        assert self.memory is not None, "no run has started"
        return self.memory.peaks()


class DryComm(TorchComm):
    """What a dry run talks through: nobody."""

    dry = True

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal

    def group(self, run: Run, meet: Callable[[dist.Store], object]) -> AbstractContextManager[None]:
        return self.rehearsal.group(run)

    def gather(self, own: Any) -> list[Any]:
        return []

    def broadcast(self, own: Any, source: int = 0) -> Any:
        return own


@contextmanager
def rehearsing(rank: int, world_size: int) -> Iterator[Rehearsal]:
    """Inside, this process is rank `rank` of `world_size` by its environment, and a run that it starts is a dry one."""
    before = dict(os.environ)
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
        "MASTER_ADDR": "127.0.0.1",  # which nobody asks
        "MASTER_PORT": "1",
    }
    rehearsal = Rehearsal(rank, world_size)
    try:
        with talking_through(DryComm(rehearsal)), no_other_group():
            yield rehearsal
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Answers(TorchDispatchMode):
    """What needs no operator is answered at once. A scalar that the host reads is 1: tensors have no elements."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # DTensor asks each tensor: more than half of all calls of a run with tp
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches operators on plain tensors, which come here
        if func is WAIT:
            return args[0]  # on fake tensors PyTorch makes a new one
        if func.overloadpacket is READ_SCALAR and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _with_memory(begin: Callable[[], None]) -> Iterator[None]:
    """Inside, `begin` is called before a model on the meta device first gets memory."""
    to_empty = torch.nn.Module.to_empty

    def first(module: torch.nn.Module, **named: Any) -> Any:
        torch.nn.Module.to_empty = to_empty  # type: ignore[method-assign]
        begin()
        return module.to_empty(**named)

    torch.nn.Module.to_empty = first  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.to_empty = to_empty  # type: ignore[method-assign]


@contextmanager
def _changed(memory: MemoryTracker, held: HeldTensors) -> Iterator[None]:
    """Inside, PyTorch and the package pass over what needs elements."""
    changes = [*_without_elements(memory, held), *_without_ranks(), *_uncounted(memory)]
    before = [(owner, name, vars(owner).get(name)) for (owner, name), _ in changes]
    try:
        for (owner, name), value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _without_elements(memory: MemoryTracker, held: HeldTensors) -> Iterator[tuple[Place, Any]]:
    """What reads elements: weights are marked instead of drawn, and NumPy and Python get zeros."""

    def fill_all(tensors: Sequence[tuple[str, torch.Tensor, Any]], *_: Any) -> None:
        memory.mark("parameters", [tensor for _, tensor, _ in tensors])
        held.add((name, tensor) for name, tensor, _ in tensors)

    def drawn(model: torch.nn.Module, *_: Any, **__: Any) -> None:
        memory.mark("parameters", [*model.parameters(), *model.buffers()])
        held.add(model.named_parameters())

    def numpy(tensor: torch.Tensor, **_: Any) -> np.ndarray:
        return np.zeros(tuple(tensor.shape))

    def tolist(tensor: torch.Tensor) -> Any:
        return np.zeros(tuple(tensor.shape)).tolist()

    yield dry_run.module_apply(), one_model(memory)
    yield (dcp, "save"), no_checkpoint
    yield (weights, "initialize"), drawn
    yield (draw, "fill_all"), fill_all
    yield (FakeTensor, "numpy"), numpy
    yield (FakeTensor, "tolist"), tolist
    for owner, name in dry_run.mesh_methods():
        yield (owner, name), _outside_fake_mode(vars(owner)[name])


def _without_ranks() -> Iterator[tuple[Place, Any]]:
    """What asks other ranks: all have what this one has."""

    def gather(mesh: Mesh, axis: str, value: Any) -> list[Any]:
        return [value] * mesh[axis].size()

    def all_gather_object(objects: list[Any], own: Any, *_: Any, **__: Any) -> None:
        objects[:] = [own] * len(objects)

    batch = dist.batch_isend_irecv

    def sent(ops: list[dist.P2POp]) -> list[Any]:
        return [_Work(work, ops) for work in batch(ops)]

    yield (Mesh, "gather"), gather
    yield (dist, "all_gather_object"), all_gather_object
    yield (dist, "broadcast_object_list"), lambda *_, **__: None
    yield (dist, "barrier"), lambda *_, **__: None
    yield (dist, "batch_isend_irecv"), sent
    for place in dry_run.ddp_checks():
        yield place, lambda *_, **__: None
    yield (DDP, "__init__"), _with_hook(DDP.__init__)
    owner, name = dry_run.ddp_before_forward()
    yield (owner, name), _with_numbers(getattr(owner, name))


def _uncounted(memory: MemoryTracker) -> Iterator[tuple[Place, Any]]:
    """What has memory here alone: FSDP's chunks for the other ranks, and DTensor's full results, for their shapes."""

    def paused(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def uncounted(*given: Any, **named: Any) -> Any:
            with memory.paused():
                return original(*given, **named)

        return uncounted

    yield dry_run.fsdp_chunks(), _Chunks
    owner, name = dry_run.dtensor_shapes()
    yield (owner, name), paused(vars(owner)[name])


@dataclass(frozen=True)
class _Chunks:
    """What FSDP makes of each parameter, a chunk a rank, and then takes one or two of: made where it is taken."""

    tensor: torch.Tensor
    count: int
    dim: int

    def __getitem__(self, number: int) -> torch.Tensor:
        size = self.tensor.shape[self.dim]
        rows = -(-size // self.count)
        begin = min(number * rows, size)
        if begin == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(rows, size - begin))


@dataclass
class _Work:
    """A message under way, which holds its tensor until nobody asks for it any more, as gloo's does."""

    work: Any
    ops: Sequence[dist.P2POp]

    def wait(self) -> bool:
        return bool(self.work.wait())


def _with_hook(make: Callable[..., None]) -> Callable[..., None]:
    """DDP, whose reducer takes the result of an all-reduce from its work, and that of a group that sends nothing has
    none."""

    def reduce(group, bucket):  # type: ignore[no-untyped-def]  # PyTorch compares annotations with classes
        buffer = bucket.buffer().div_(group.size())
        dist.all_reduce(buffer, group=group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    @functools.wraps(make)
    def init(self: DDP, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.register_comm_hook(self.process_group, reduce)
        # A program's own hook would ask the work for its result as well. It is counted as an all-reduce.
        self.register_comm_hook = lambda state, hook: None  # type: ignore[method-assign]

    return init


class _Numbers(TorchDispatchMode):
    """Integers have elements: DDP reads those that say how it has packed its gradients."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is ATEN.empty.memory_format and named.get("dtype") == torch.int32:
            with unset_fake_temporarily():
                return func(*args, **named)
        return func(*args, **named)


def _with_numbers(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def pre_forward(*given: Any, **named: Any) -> Any:
        with _Numbers():
            return method(*given, **named)

    return pre_forward


def _outside_fake_mode(method: Any) -> Any:
    """Meshes compute with tensors of ranks, which need elements."""
    wrapped = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method

    @functools.wraps(wrapped)
    def outside(*given: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return wrapped(*given, **named)

    return type(method)(outside) if isinstance(method, (staticmethod, classmethod)) else outside
