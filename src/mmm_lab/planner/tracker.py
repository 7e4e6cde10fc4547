"""Counts the memory of one rank, storage by storage: how much it holds at the peak, and what for.

A dispatch mode sees the results of every operator. A storage counts from then until it is freed, with its current size,
because FSDP frees and refills storages in place. What a storage is for is often known only later (a tensor turns out to
be a gradient when an optimizer sees it). So all changes of size are kept in a list, and added up at the end.

Not counted: memory that kernels use internally, memory of the communication library, what the allocator loses between
tensors, and data that were there before the model, such as NumPy arrays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mmm.layout import Layout
from mmm.parallel.local import to_local
from mmm.torch_private.autograd import in_backward
from mmm.torch_private.fake import active_fake_mode
from mmm.torch_private.module import storage_id
from mmm.torch_private.operators import schema_name, tensors_in
from mmm.torch_private.replace import replaced
from mmm.traffic.dispatch import PlainTensors

PARTS = (
    # parameters and buffers
    "parameters",
    # sharded or not
    "gradients",
    "optimizer state",
    # results of forward, also where backward computes it again
    "activations",
    # tensors whose last dim is the vocabulary, or this rank's shard of it (`logit_widths`)
    "logits",
    # parameters that FSDP has gathered, and the buffers that it gathers them through
    "gathered",
    # other buffers that are sent or received: of reduce-scatters, and a pipeline's messages
    "communication",
    # the rest of backward, clipping and the optimizer: mostly gradients of activations
    "temporary",
)


@dataclass
class MemoryPeak:
    """The most bytes that a rank held at one time.

    Attributes:
        parts: the bytes of each of `PARTS` at that moment; they add up to `bytes`.
        phase: phase of the run, such as ``step 1``.
        doing: ``forward``, ``backward`` or ``optimizer``.
    """

    bytes: int
    parts: dict[str, int]
    phase: str
    doing: str


@dataclass
class _Change:
    """A storage was made, resized or freed.

    Attributes:
        storage: index of the storage.
        bytes: bytes that were added; negative if memory was freed.
    """

    storage: int
    bytes: int
    phase: str
    doing: str


@dataclass
class _Live:
    """A storage that has memory.

    Attributes:
        index: index of the storage.
        bytes: its current size.
        reference: weak reference, whose callback says when the storage is freed.
    """

    index: int
    bytes: int
    reference: Any


@dataclass
class MemoryTracker:
    """Counts the tensors of one device type inside `tracking`; afterwards `peaks` has the result.

    Args:
        device: type of the device, such as ``cpu``.
        phase: returns the phase of the run; called at each change.
        widths: sizes of the last dim of logits.
    """

    device: str
    phase: Callable[[], str]
    widths: set[int] = field(default_factory=set)
    changes: list[_Change] = field(default_factory=list)
    # One of `PARTS` for each storage, by its index.
    _kinds: list[str] = field(default_factory=list)
    # By the storage's id (`storage_id`).
    _live: dict[int, _Live] = field(default_factory=dict)
    _in_optimizer: bool = False
    _paused: int = 0
    _fake_mode: Any = None

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Count the tensors that the block makes."""
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
            for state in optimizer.state.values():
                self.mark("optimizer state", [value for value in state.values() if isinstance(value, Tensor)])

        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        self._fake_mode = active_fake_mode()
        try:
            with _Storages(self), replaced(torch.UntypedStorage, resize_=resized):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: the real program does not do what the block does."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def counts(self) -> bool:
        """Whether tensors that are made now count."""
        return not self._paused and active_fake_mode() is self._fake_mode

    def mark(
        self,
        kind: str,
        tensors: Iterable[Tensor],
        replace: Sequence[str] = PARTS,
    ) -> None:
        """Say what the storages of tensors are for, also in changes that were noted before.

        Args:
            kind: one of `PARTS`.
            replace: only storages that count as one of these so far are changed.
        """
        for tensor in tensors:
            live = self._live.get(storage_id(to_local(tensor).untyped_storage()))
            if live is not None and self._kinds[live.index] in replace:
                self._kinds[live.index] = kind

    def doing(self) -> str:
        """``forward``, ``backward`` or ``optimizer``."""
        if self._in_optimizer:
            return "optimizer"
        return "backward" if in_backward() else "forward"

    def see(self, tensor: Tensor) -> None:
        """Count the storage of an operator's result, unless it is counted already."""
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._live:
            self._resized(storage)
            return
        index = len(self._kinds)
        self._kinds.append(self._kind_of(tensor))
        size = storage.nbytes()
        self._live[key] = _Live(index, size, weakref.ref(storage, lambda _: self._freed(key, index)))
        self._change(index, size)

    def _kind_of(self, tensor: Tensor) -> str:
        """What a new tensor is for, as far as that is known now."""
        if self.phase() == "start":
            return "parameters"
        if tensor.ndim > 1 and tensor.shape[-1] in self.widths:
            return "logits"
        doing = self.doing()
        # Gradients are on in backward where checkpointing computes a layer again.
        if doing == "forward" or (doing == "backward" and torch.is_grad_enabled()):
            return "activations"
        return "temporary"

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Note the new size of a storage."""
        live = self._live.get(storage_id(storage))
        if live is None or live.bytes == storage.nbytes():
            return
        if self._kinds[live.index] in ("activations", "temporary"):
            # Only FSDP frees the memory of a tensor that stays in use.
            self._kinds[live.index] = "gathered"
        self._change(live.index, storage.nbytes() - live.bytes)
        live.bytes = storage.nbytes()

    def _freed(self, key: int, index: int) -> None:
        """Note that a storage is gone. Another one may have its key by now."""
        live = self._live.get(key)
        if live is not None and live.index == index:
            del self._live[key]
            self._change(index, -live.bytes)

    def _change(self, index: int, count: int) -> None:
        if count:
            self.changes.append(_Change(index, count, self.phase(), self.doing()))

    def peaks(self) -> dict[str, MemoryPeak]:
        """The peak of each phase."""
        total = 0
        parts = dict.fromkeys(PARTS, 0)
        peaks: dict[str, MemoryPeak] = {}
        for change in self.changes:
            # Bytes that are in use after this change.
            total += change.bytes
            parts[self._kinds[change.storage]] += change.bytes
            if change.phase not in peaks or total > peaks[change.phase].bytes:
                peaks[change.phase] = MemoryPeak(total, dict(parts), change.phase, change.doing)
        return peaks


class _Storages(PlainTensors):
    """Shows a tracker the tensors of every operator."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tracker = self.tracker
        if tracker.counts():
            for tensor in tensors_in(result):
                tracker.see(tensor)
            if func.namespace in SENDS:
                SENDS[func.namespace](tracker, func, args, kwargs, result)
        return result


def logit_widths(job: Any, layout: Layout) -> set[int]:
    """The size of the last dim of the logits of a run's model, on one rank (`MemoryTracker.widths`).

    It is empty if something else in the model has that size too: then a last dim does not say what a tensor is.
    """
    model = getattr(job, "model", None)
    vocabulary = getattr(getattr(job, "sizes", None), "vocab_size", 0)
    if model is None or not vocabulary or getattr(job, "plan", None) is None:
        return set()
    # Attention scores end with the number of tokens.
    others = set(job.sample.shape[1:])
    for name, parameter in model.named_parameters():
        # Rows of an embedding and of an output, outside of the layers, are the vocabulary itself.
        is_end = name.count(".") == 1
        others.update(parameter.shape[1:] if is_end else parameter.shape)
    # tp shards any of these dims.
    others |= {-(-size // layout.tp) for size in others}
    return {-(-vocabulary // layout.tp)} - others


def _of_fsdp(
    tracker: MemoryTracker,
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
) -> None:
    """Mark the tensors of one of FSDP's own operators."""
    if "chunk_cat" in schema_name(func):
        # It copies the gradients of a unit into the input of the reduce-scatter.
        tracker.mark("gradients", tensors_in(args), ("temporary",))
        tracker.mark("communication", tensors_in([kwargs.get("out"), result]), ("temporary",))
    else:
        tracker.mark("gathered", tensors_in([*args, *kwargs.values(), result]), ("activations", "temporary"))


def _of_c10d(
    tracker: MemoryTracker,
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
) -> None:
    """Mark the tensors of a collective, or of a message."""
    name = schema_name(func)
    if any(operation in name for operation in ("reduce_scatter", "send", "recv", "alltoall")):
        tracker.mark("communication", tensors_in(list(args)), ("temporary", "activations"))


SENDS = {"fsdp": _of_fsdp, "c10d": _of_c10d}
