"""Measures how much of a model is local to a rank, and how much memory a piece of work needs at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.local import to_local
from mmm.torch_private.dry_run import memory_tracker
from mmm.torch_private.module import storage_id


def local_elements(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Elements that this rank has in memory: ``parameters``, ``gradients`` and ``optimizer_state``.

    Call it between backward and ``zero_grad``, after at least one step: an optimizer makes its state in the first. It
    counts storage, each once: with padding where ranks do not divide a tensor, and in full where a view keeps it alive.
    Gathered parameters and temporaries are not counted.
    """
    inner = unwrapped(model)
    parameters = list(inner.parameters())
    # Under ZeRO the parameters of the wrapper are other tensors than those of the model; both may have gradients.
    gradients = [p.grad for p in (*parameters, *model.parameters()) if p.grad is not None]
    state = []
    for values in optimizer.state.values():
        for value in values.values():
            # Scalars are counts of steps.
            if isinstance(value, Tensor) and value.ndim:
                state.append(value)
    return {
        "parameters": _elements(parameters),
        "gradients": _elements(gradients),
        "optimizer_state": _elements(state),
    }


def _elements(tensors: Iterable[Tensor]) -> int:
    """Elements of the storages of tensors, each storage once."""
    elements = {}
    for tensor in tensors:
        local = to_local(tensor)
        storage = local.untyped_storage()
        elements[storage_id(storage)] = storage.nbytes() // local.element_size()
    return sum(elements.values())


class Peak:
    """The most bytes that work on a model has allocated at one time, on top of what was allocated before it.

    On an accelerator the allocator knows. On a CPU, which keeps no count, PyTorch's ``MemTracker`` follows every tensor
    from its allocation to its end. That makes the work slower, and does not include what a kernel itself uses. ::

        with Peak(device, model) as peak:
            loss_fn(model(inputs), targets, count).backward()
        print(peak.bytes)

    Attributes:
        bytes: the peak, known after the block.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device = device
        self.model = model
        self.bytes = 0
        self.before = 0
        # torch.cuda or torch.xpu; None where there is no allocator to ask.
        self.allocator: Any = None
        if device.type not in ("cpu", "mps"):
            self.allocator = getattr(torch, device.type)

    def __enter__(self) -> Self:
        if self.allocator is not None:
            self.allocator.synchronize()
            self.allocator.reset_peak_memory_stats()
            self.before = self.allocator.memory_allocated()
            return self
        self.tracker = memory_tracker()
        # The model was allocated before the tracker began.
        self.tracker.track_external(self.model)
        self.tracker.__enter__()
        self.before = self._tracked("current")
        return self

    def __exit__(self, *stopped: Any) -> None:
        if self.allocator is not None:
            self.allocator.synchronize()
            self.bytes = self.allocator.max_memory_allocated() - self.before
            return
        self.bytes = self._tracked("peak") - self.before
        self.tracker.__exit__(*stopped)

    def _tracked(self, snapshot: str) -> int:
        """Bytes in a snapshot of the tracker, ``current`` or ``peak``, over all devices."""
        devices = self.tracker.get_tracker_snapshot(snapshot).values()
        return sum(kinds["Total"] for kinds in devices)
