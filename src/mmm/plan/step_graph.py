"""What a rank computes and sends in a step of a dry run, operator by operator, and what waits for what.

A node is an operator that reads or writes memory, or a call to a process group. It depends on

- the nodes that wrote what it reads or overwrites: data, known by the storages of tensors;
- the nodes that still read what it overwrites;
- the one before it on its stream: kernels run in program order, and so do the calls of one communicator.

Streams are those that PyTorch has on an accelerator: ``compute``; FSDP's for what it copies before an all-gather
(``fsdp gather``) and around a reduce-scatter (``fsdp reduce``); one for each group, named as its axis. A message waits
for messages in its direction with the same rank, not for those the other way, which may be under way at once. An
all-gather of FSDP also waits until the one before has been copied out: FSDP has one buffer ahead.

A CPU has no such streams: there a run waits for more.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from mmm.plan.sent_calls import SentCall, SentInOrder
from mmm.plan.tracker import MemoryTracker, tensors_in
from mmm.torch_private.fsdp import collectives_module
from mmm.torch_private.module import storage_id
from mmm.torch_private.operators import TorchDispatchMode, schema_arguments, schema_name
from mmm.traffic.count import process_group_of

COMPUTE, GATHER, REDUCE = "compute", "fsdp gather", "fsdp reduce"
MESSAGES = ("send", "receive")
COPY_IN = "fsdp::all_gather_copy_in"  # fills this rank's part of the buffer that is gathered
# Allocates, or says something of a tensor to the host; no kernel.
SILENT = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "lift_fresh"),
    *("detach", "record_stream", "wait_tensor", "_local_scalar_dense"),
}


@dataclass(frozen=True)
class Communication:
    """A call to a process group. ranks: of the group. peer: rank at the other end of a message, else -1; tag: its."""

    sent: SentCall
    ranks: tuple[int, ...]
    peer: int = -1
    tag: int = 0


@dataclass(frozen=True)
class Node:
    """An operator, or a call.

    Attributes:
        name: of the operator. doing: ``forward``, ``backward`` or ``optimizer``.
        flops: of matrix products and attention, as PyTorch's `FlopCounterMode` counts. elements: of its largest tensor.
        read, written: bytes of its tensors, as though no cache kept any.
        data: numbers of the nodes that wrote what it reads or overwrites. order: of others that it waits for.
    """

    name: str
    stream: str
    doing: str
    flops: int
    elements: int
    read: int
    written: int
    data: tuple[int, ...]
    order: tuple[int, ...]
    communication: Communication | None = None


@dataclass
class _Uses:
    """Of a storage in this step: the node that wrote it last, and those that have read it since."""

    reference: Any
    writer: int | None = None
    readers: list[int] = field(default_factory=list)


class StepGraph(TorchDispatchMode):
    """Keeps the nodes of the last step in `nodes`, for as long as it is entered, as the outermost mode."""

    def __init__(self, memory: MemoryTracker, traffic: SentInOrder, phase: Callable[[], str]) -> None:
        super().__init__()
        self.memory, self.traffic, self.phase = memory, traffic, phase
        self.nodes = list[Node]()
        self.stream = COMPUTE
        self._step = ""
        self._uses: dict[int, _Uses] = {}  # by a storage's address
        self._last: dict[Any, int] = {}  # stream → its last node
        self._copied_out: int | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, nodes are kept, and what FSDP does on streams of its own is known as such."""
        streams = {"foreach_all_gather": GATHER, "foreach_reduce": REDUCE}
        module = collectives_module()
        before = {name: getattr(module, name) for name in streams}
        try:
            for name, stream in streams.items():
                setattr(module, name, self._on(stream, before[name]))
            with self:
                yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)

    def _on(self, stream: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def on_stream(*given: Any, **named: Any) -> Any:
            outside, self.stream = self.stream, stream
            try:
                return method(*given, **named)
            finally:
                self.stream = outside

        return on_stream

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches operators on plain tensors, which come here
        kwargs, calls = kwargs or {}, self.traffic.calls
        before = len(calls)
        result = func(*args, **kwargs)
        if (step := self.phase()).startswith("step ") and self.memory.counts():
            if step != self._step:
                self._step, self._copied_out = step, None
                self.nodes, self._uses, self._last = [], {}, {}
            if func.overloadpacket.__name__ not in SILENT:
                self._add(func, args, kwargs, result, calls[before:])
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any, calls: list[SentCall]) -> None:
        arguments = {**dict(zip((a.name for a in schema_arguments(func)), args, strict=False)), **kwargs}
        read, written = _reads_and_writes(func, arguments)
        made = [t for t in tensors_in(result) if t.layout == torch.strided]
        given = {storage_id(t.untyped_storage()) for t in (*read, *written)}
        fresh = [t for t in made if storage_id(t.untyped_storage()) not in given]
        if not fresh and not written and not calls:
            return  # a view
        written = [*written, *fresh]
        sent: list[SentCall | None] = [call for call in calls if call.call.size > 1]
        for call in sent or [None]:
            self._add_node(func, arguments, read, written, result, call)

    def _add_node(
        self,
        func: Any,
        arguments: dict[str, Any],
        read: list[Tensor],
        written: list[Tensor],
        result: Any,
        sent: SentCall | None,
    ) -> None:
        number = len(self.nodes)
        data, order = set[int](), set[int]()
        overwritten = [self._of(tensor) for tensor in written]
        for uses in (*(self._of(tensor) for tensor in read), *overwritten):
            if uses.writer is not None:
                data.add(uses.writer)
        for uses in overwritten:
            order.update(uses.readers)
        communication, stream, line = None, self.stream, tuple[Any, ...]([self.stream])
        if sent is not None:
            communication, stream = _communication(sent, arguments), sent.axis
            message = [sent.call.operation, communication.peer] if communication.peer >= 0 else []
            line = (communication.ranks, *message)
        if line in self._last:
            order.add(self._last[line])
        if self.stream == GATHER and self._copied_out is not None:
            order.add(self._copied_out)
        self._last[line] = number
        if schema_name(func) == "fsdp::split_with_sizes_copy":
            self._copied_out = number
        for tensor in read:
            self._of(tensor).readers.append(number)
        for uses in overwritten:
            uses.writer, uses.readers = number, []
        self.nodes.append(
            Node(
                schema_name(func),
                stream,
                self.memory.doing(),
                0 if sent is not None else flops_of(func, arguments, result),
                max((tensor.numel() for tensor in (*read, *written)), default=0),
                sum(map(_bytes, read)),
                sum(map(_bytes, result[:1] if schema_name(func) == COPY_IN else written)),
                tuple(sorted(data)),
                tuple(sorted(order - data - {number})),
                communication,
            )
        )

    def _of(self, tensor: Tensor) -> _Uses:
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address not in self._uses:
            uses = self._uses
            ended = weakref.ref(storage, lambda _: uses.pop(address, None))  # an address may come again
            self._uses[address] = _Uses(ended)
        return self._uses[address]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reads_and_writes(func: Any, arguments: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those of its arguments that it writes."""
    read, written = list[Tensor](), list[Tensor]()
    name = schema_name(func)
    for argument in schema_arguments(func):
        tensors = [t for t in tensors_in(arguments.get(argument.name)) if t.layout == torch.strided]
        if func.namespace == "c10d":  # whose schemas do not say what is written
            output = argument.name.startswith("output")
            if output or (argument.name == "tensors" and "send" not in name):
                written += tensors
            if not output and "recv" not in name:
                read += tensors
        elif argument.name == "all_gather_output" and name == COPY_IN:
            written += tensors  # a part of it; its schema does not say so
        elif argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors
            if argument.name != "out":
                read += tensors
        else:
            read += tensors
    return read, written


def _communication(sent: SentCall, arguments: dict[str, Any]) -> Communication:
    ranks = tuple(dist.get_process_group_ranks(process_group_of(arguments)))
    if sent.call.operation not in MESSAGES:
        return Communication(sent, ranks)
    other = arguments.get("dst", arguments.get("src"))
    if other is None:
        raise RuntimeError(f"a trace of {sent}: who is at its other end is not known")
    return Communication(sent, ranks, ranks[other], arguments.get("tag", 0))


def flops_of(func: Any, arguments: dict[str, Any], result: Any) -> int:
    """Of matrix products, convolutions and attention, two for a product and its sum; of all else 0. Of attention all
    scores count, also those that a causal kernel leaves out.

    PyTorch's formulas, and where it has none: attention's kernels of each device, products by expert.
    """
    name = schema_name(func).split("::")[1]
    if "scaled_dot_product" in name:
        query, key, value = (arguments[part].shape for part in ("query", "key", "value"))
        of_queries, of_values = (3, 2) if "backward" in name else (1, 1)  # backward computes the scores again
        return 2 * math.prod(query[:-1]) * key[-2] * (of_queries * query[-1] + of_values * value[-1])
    if name == "_grouped_mm":
        first, second = arguments["self"], arguments["mat2"]
        groups = first.shape[0] if first.ndim == 3 and second.ndim == 2 else 1
        return 2 * first.numel() * second.shape[-1] // groups
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0
    return int(count(*arguments.values(), out_val=result))
