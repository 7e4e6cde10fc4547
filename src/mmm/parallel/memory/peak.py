"""How much memory a piece of work needs at its peak, measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from mmm.torch_private.dry_run import memory_tracker


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
