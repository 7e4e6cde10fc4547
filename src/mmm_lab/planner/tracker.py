"""The memory of one rank, storage by storage: how much there is at the peak, and of what.

A dispatch mode sees what every operator makes. A storage counts from then to its end, with the bytes that it has by
then: FSDP frees and refills storages in place. What a storage is for is often known later than it is made (a gradient
is one once an optimizer sees it); so all changes are kept in a list, and added up at the end.

Not in it: what a kernel takes inside itself, what a communication library takes for itself, what an allocator loses
between tensors, and data that were there before a model, as in NumPy's arrays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mmm.layout import Layout
from mmm.parallel.local import to_local
from mmm.parallel.plan import find
from mmm.torch_private.autograd import in_backward
from mmm.torch_private.fake import active_fake_mode
from mmm.torch_private.module import storage_id
from mmm.torch_private.operators import TorchDispatchMode, schema_name

PARTS = (
    "parameters",  # and buffers
    "gradients",  # sharded or not
    "optimizer state",
    "activations",  # made in forward, also where backward computes it anew
    "logits",  # whatever has the vocabulary, or this rank's part of it, for its last dim (`logit_widths`)
    "gathered",  # parameters that FSDP has gathered, and what it gathers them through
    "communication",  # what is sent or received besides: reduce-scatters, a pipeline's messages
    "temporary",  # of backward, clipping and the optimizer: gradients of activations, mostly
)


@dataclass
class MemoryPeak:
    """The most bytes at once.

    Attributes:
        parts: the bytes of each of `PARTS` at that moment; they add up to `bytes`.
        phase: of the program, such as ``step 1``; doing: ``forward``, ``backward`` or ``optimizer``.
    """

    bytes: int
    parts: dict[str, int]
    phase: str
    doing: str


@dataclass
class _Change:
    storage: int  # its number
    bytes: int  # more, or less
    phase: str
    doing: str


@dataclass
class MemoryTracker:
    """Counts tensors of one device type inside `tracking`; `peaks` says what there was.

    Args:
        device: type of the device, such as ``cpu``.
        phase: asked at each change for the name of what the program does.
    """

    device: str
    phase: Callable[[], str]
    widths: set[int] = field(default_factory=set)  # of logits: their last dim
    changes: list[_Change] = field(default_factory=list)
    _kinds: list[str] = field(default_factory=list)  # by a storage's number
    _live: dict[int, tuple[int, int, Any]] = field(default_factory=dict)  # address → number, bytes, weak reference
    _in_optimizer: bool = False
    _paused: int = 0
    _fake_mode: Any = None

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Count what the block does."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if not self._paused:
                self._resized(storage)
            return result

        def before(optimizer: Optimizer, *_: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.mark("parameters", parameters)
            self.mark("gradients", [p.grad for p in parameters if p.grad is not None])
            self._in_optimizer = True

        def after(optimizer: Optimizer, *_: Any) -> None:
            self._in_optimizer = False
            state = (value for of_one in optimizer.state.values() for value in of_one.values())
            self.mark("optimizer state", [value for value in state if isinstance(value, Tensor)])

        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        self._fake_mode = active_fake_mode()
        try:
            with _Storages(self):
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: what is tried there, the program does not do."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def counts(self) -> bool:
        return not self._paused and active_fake_mode() is self._fake_mode

    def mark(self, kind: str, tensors: Iterable[Tensor], replace: Sequence[str] = PARTS) -> None:
        """Say what the storages of tensors are for, also looking back; of those alone that count as one of `replace` so
        far."""
        for tensor in tensors:
            known = self._live.get(storage_id(to_local(tensor).untyped_storage()))
            if known is not None and self._kinds[known[0]] in replace:
                self._kinds[known[0]] = kind

    def doing(self) -> str:
        if self._in_optimizer:
            return "optimizer"
        return "backward" if in_backward() else "forward"

    def see(self, tensor: Tensor) -> None:
        """Count the storage of an operator's result, if it is not counted yet."""
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        known = self._live.get(address)
        if known is not None:
            if known[1] != storage.nbytes():
                self._resized(storage)
            return
        number = len(self._kinds)
        self._kinds.append(self._kind_of(tensor))
        size = storage.nbytes()
        reference = weakref.ref(storage, lambda _, address=address, number=number: self._ended(address, number))  # type: ignore[misc]
        self._live[address] = number, size, reference
        self._change(number, size)

    def _kind_of(self, tensor: Tensor) -> str:
        if self.phase() == "start":
            return "parameters"
        if tensor.ndim > 1 and tensor.shape[-1] in self.widths:
            return "logits"
        doing = self.doing()
        if doing == "forward" or (doing == "backward" and torch.is_grad_enabled()):
            return "activations"
        return "temporary"

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage_id(storage))
        if known is None or known[1] == storage.nbytes():
            return
        number, before, reference = known
        if self._kinds[number] in ("activations", "temporary"):
            self._kinds[number] = "gathered"  # nothing but FSDP frees a storage that goes on
        self._live[storage_id(storage)] = number, storage.nbytes(), reference
        self._change(number, storage.nbytes() - before)

    def _ended(self, address: int, number: int) -> None:
        known = self._live.get(address)
        if known is not None and known[0] == number:
            del self._live[address]
            self._change(number, -known[1])

    def _change(self, number: int, count: int) -> None:
        if count:
            self.changes.append(_Change(number, count, self.phase(), self.doing()))

    def peaks(self) -> dict[str, MemoryPeak]:
        """The peak of each phase."""
        total, most = 0, dict[str, tuple[int, int]]()  # bytes, and the number of the change that led to them
        for at, change in enumerate(self.changes):
            total += change.bytes
            if total > most.get(change.phase, (-1, 0))[0]:
                most[change.phase] = total, at
        found: dict[str, MemoryPeak] = {}
        for phase, (count, at) in most.items():
            parts = dict.fromkeys(PARTS, 0)
            for change in self.changes[: at + 1]:
                parts[self._kinds[change.storage]] += change.bytes
            found[phase] = MemoryPeak(count, parts, phase, self.changes[at].doing)
        return found


class _Storages(TorchDispatchMode):
    """Shows a tracker the tensors of every operator."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches operators on plain tensors, which come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tracker = self.tracker
        if tracker.counts():
            for tensor in tensors_in(result):
                tracker.see(tensor)
            if func.namespace in SENDS:
                SENDS[func.namespace](tracker, func, args, kwargs, result)
        return result


def logit_widths(resolved: Any, layout: Layout) -> set[int]:
    """The last dim of the logits of a run's model, on a rank (`MemoryTracker.widths`); none where something else of the
    model has that size too, and a last dim does not say what a tensor is."""
    plan, model = getattr(resolved, "plan", None), getattr(resolved, "model", None)
    outputs = find(model, plan.output) if plan is not None and model is not None and plan.output else []
    sizes = [getattr(output, "out_features", 0) for output in outputs]
    sizes = sizes or [getattr(getattr(resolved, "sizes", None), "vocab_size", 0)]
    others = set(
        getattr(getattr(resolved, "sample", None), "shape", ())[1:]
    )  # tokens: scores of attention end with them
    for module in model.modules() if model is not None else ():
        ours = any(module is output for output in outputs) or getattr(module, "num_embeddings", None) in sizes
        for parameter in module.parameters(recurse=False):
            others.update(parameter.shape[1:] if ours else parameter.shape)
    others |= {-(-size // layout.tp) for size in others}
    return {-(-size // layout.tp) for size in sizes} - others


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """The plain tensors in arguments or results of an operator."""
    if isinstance(nested, Tensor):
        if not isinstance(nested, DTensor):
            yield nested
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            yield from tensors_in(part)


def _of_fsdp(tracker: MemoryTracker, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    name = schema_name(func)
    if "chunk_cat" in name:  # copies a unit's gradients into the input of the reduce-scatter
        tracker.mark("gradients", tensors_in(args), ("temporary",))
        tracker.mark("communication", tensors_in([kwargs.get("out"), result]), ("temporary",))
    else:
        tracker.mark("gathered", tensors_in([*args, *kwargs.values(), result]), ("activations", "temporary"))


def _of_c10d(tracker: MemoryTracker, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    name = schema_name(func)
    if "reduce_scatter" in name or "send" in name or "recv" in name or "alltoall" in name:
        tracker.mark("communication", tensors_in(list(args)), ("temporary", "activations"))


SENDS: dict[str, Callable[..., None]] = {"fsdp": _of_fsdp, "c10d": _of_c10d}
