"""ZeRO-1 and ZeRO-2: every rank has the whole model, but keeps and updates the optimizer state of its own part only.

A step, on a parameter with rows A B C D and two ranks::

                    rank 0              rank 1
    parameter       A B C D             A B C D          whole on both, all the time
    gradient        a b c d             a'b'c'd'         of each rank's own samples
      │ reduce: zero1 all-reduce, zero2 reduce-scatter, as soon as backward has made it
      ▼
    gradient        [a+a' b+b']         [c+c' d+d']      its part (zero1: the other rows stay in memory as well)
      │ optimizer.step(), on these rows only
      ▼
    parameter       A*B*C D             A B C*D*         in place: the part is a view of the whole parameter
      │ all-gather
      ▼
    parameter       A*B*C*D*            A*B*C*D*

``parameters()`` of the wrapped model are those parts, as `DTensor` cut along dim 0, with the names and whole shapes of
the parameters. So any optimizer that treats every element by itself (SGD, Adam, AdamW, …) is right, and so are gradient
clipping, GradScaler and learning-rate schedules; its state has the shape of FSDP's. ``state_dict()`` has the whole
parameters, and ``module`` is the model.

With offload the parts, their gradients and so the optimizer's state and its step are on the host; the step's result
goes up to the device, and is then gathered (`mmm.parallel.memory.offload`).

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from mmm.parallel.data.replicas import Replicas
from mmm.runtime.device import Precision

# PyTorch 2.13 has new names for these two, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Part:
    """A whole parameter and the rows of it that this rank updates.

    Rank r has rows r·c … (r + 1)·c - 1 with c = ceil(rows / ranks), as ``torch.chunk`` cuts; the last ranks may have
    fewer, or none.

    Attributes:
        whole: the model's parameter. shard: this rank's rows of it, in the same memory.
        memory: that of `whole`, with rows added until all ranks have the same number, as collectives want it.
        host: with offload the memory of `shard`, on the host; else None.
    """

    def __init__(self, name: str, whole: nn.Parameter, mesh: DeviceMesh, host: DeviceMesh | None = None) -> None:
        if whole.ndim == 0:
            raise ValueError(f"parameter {name} is a single number, which has no rows to cut: give it shape (1,)")
        rows, ranks, rank = whole.shape[0], mesh.size(), mesh.get_local_rank()
        chunk = -(-rows // ranks)
        self.whole, self.mesh, self.group = whole, host or mesh, mesh.get_group()
        self.memory = whole.data.new_zeros(chunk * ranks, *whole.shape[1:])
        self.memory[:rows] = whole.data
        whole.data = self.memory[:rows]
        self.rows = slice(min(rank * chunk, rows), min((rank + 1) * chunk, rows))
        self.slot = slice(rank * chunk, (rank + 1) * chunk)  # the same, with the rows added
        mine = self.memory[self.rows]
        pinned = mesh.device_type != "cpu"
        self.host = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=pinned).copy_(mine) if host else None
        self.shard = nn.Parameter(self._cut(mine if self.host is None else self.host))

    def _cut(self, rows: Tensor) -> DTensor:
        """This rank's rows as a part of the whole; no copy."""
        shape, stride = self.whole.shape, self.whole.stride()
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def reduce(self, keep_whole: bool) -> tuple[dist.Work, Tensor]:
        """Begin to sum the gradient over the ranks; the whole one of this rank's samples goes.

        Returns:
            What to wait for, and where this rank's rows of the sum will then be.
        """
        assert self.whole.grad is not None
        gradient, self.whole.grad = self.whole.grad.contiguous(), None
        if keep_whole:
            return dist.all_reduce(gradient, group=self.group, async_op=True), gradient[self.rows]
        if len(gradient) < len(self.memory):
            gradient = torch.cat((gradient, gradient.new_zeros(len(self.memory) - len(gradient), *gradient.shape[1:])))
        mine = torch.empty_like(gradient[self.slot])
        work = reduce_scatter(mine, gradient, group=self.group, async_op=True)
        return work, mine[: self.rows.stop - self.rows.start]

    def accumulate(self, rows: Tensor) -> None:
        """Add to the gradient of the shard."""
        if self.host is not None:
            rows = rows.to("cpu", copy=True)
        if self.shard.grad is None:
            self.shard.grad = self._cut(rows)
        else:
            self.shard.grad.to_local().add_(rows)  # type: ignore[attr-defined]

    def gather(self) -> dist.Work:
        """Begin to fill in the rows that other ranks have updated."""
        if self.host is not None:
            self.memory[self.rows].copy_(self.host)
        return all_gather(self.memory, self.memory[self.slot].clone(), group=self.group, async_op=True)


class Zero(Replicas):
    """ZeRO-2, or with `keep_gradients` ZeRO-1.

    One collective a parameter, overlapped with backward. With several backwards a step the parts add up; those that do
    not reduce (`sync_gradients`) keep this rank's own whole gradients until one does.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, precision: Precision, keep_gradients: bool, offload: bool = False
    ) -> None:
        super().__init__(module, mesh, precision)
        self.keep_gradients, self.offload = keep_gradients, offload
        self.reduce_now = True
        self.parts: dict[str, Part] = {}
        self.pending: list[tuple[Part, dist.Work, Tensor]] = []

    def _connect(self) -> None:
        # The same ranks, by their CPU backend: what is summed over parts on the host, such as a norm, goes by gloo.
        host = DeviceMesh.from_group(self.mesh.get_group(), "cpu") if self.offload else None
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self.parts[name] = part = Part(name, parameter, self.mesh, host)
                parameter.register_post_accumulate_grad_hook(lambda _, part=part: self._begin(part))
        if self.offload:
            self.module.register_load_state_dict_post_hook(lambda *_: self._to_host())
        # After the step of whichever optimizer has the shards.
        shards = {id(part.shard) for part in self.parts.values()}
        model = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            updated = (id(p) in shards for group in optimizer.param_groups for p in group["params"])
            if (zero := model()) is not None and any(updated):
                zero.gather()

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def _to_host(self) -> None:
        """Make the parts on the host those of the whole parameters."""
        for part in self.parts.values():
            if part.host is not None:
                part.host.copy_(part.memory[part.rows])

    def _begin(self, part: Part) -> None:
        """Backward has made a gradient: send it off, and have `_finish` called at the end of this backward."""
        if not self.reduce_now:
            return
        if not self.pending:
            Variable._execution_engine.queue_callback(self._finish)
        self.pending.append((part, *part.reduce(self.keep_gradients)))

    def _finish(self) -> None:
        for part, work, rows in self.pending:
            work.wait()
            part.accumulate(rows)
        self.pending.clear()

    def sync_gradients(self, now: bool) -> None:
        self.reduce_now = now

    def gather(self) -> None:
        """Make the whole parameters those of the shards. Done after every step of the optimizer. A collective."""
        for work in [part.gather() for part in self.parts.values()]:
            work.wait()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank: the shards, once there are any."""
        start = f"{prefix}." if prefix else ""
        parts = {id(part.whole): part for part in self.parts.values()}  # a tied parameter has a second name
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            part = parts.get(id(parameter))
            yield start + name, part.shard if part is not None else parameter
