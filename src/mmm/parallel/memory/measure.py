"""How much of a model is local to a rank, in which the data-parallel techniques differ; and how much memory a piece of
work needs at its peak."""

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

    To be called between backward and ``zero_grad``, after a step (an optimizer makes its state in the first one).
    Counts storage, each once: with padding where ranks do not divide a tensor, and in full where a view keeps it alive.
    Gathered parameters and temporaries are not counted.
    """
    inner = unwrapped(model)
    parameters = list(inner.parameters())
    gradients = [p.grad for p in (*parameters, *model.parameters()) if p.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return {
        "parameters": _elements(parameters),
        "gradients": _elements(gradients),
        "optimizer_state": _elements(tensor for tensor in state if tensor.ndim),  # not the count of steps
    }


def _elements(tensors: Iterable[Tensor]) -> int:
    elements = {}
    for local in map(to_local, tensors):
        storage = local.untyped_storage()
        elements[storage_id(storage)] = storage.nbytes() // local.element_size()
    return sum(elements.values())


class Peak:
    """The most bytes that work on a model has had at once, beyond what was there before it.

    On an accelerator the allocator says. On a CPU, which keeps no count, PyTorch's ``MemTracker`` follows every tensor
    from its making to its end; that makes the work slower, and what a kernel uses inside itself is not in it. ::

        with Peak(device, model) as peak:
            loss_fn(model(inputs), targets, count).backward()
        print(peak.bytes)

    Attributes:
        bytes: known after the block.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device, self.model, self.bytes, self.before = device, model, 0, 0
        self.allocator: Any = None if device.type in ("cpu", "mps") else getattr(torch, device.type)

    def __enter__(self) -> Self:
        if self.allocator is not None:
            self.allocator.synchronize()
            self.allocator.reset_peak_memory_stats()
            self.before = self.allocator.memory_allocated()
            return self
        self.tracker = memory_tracker()
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

    def _tracked(self, when: str) -> int:
        return sum(kinds["Total"] for kinds in self.tracker.get_tracker_snapshot(when).values())
