"""ZeRO-1 and ZeRO-2: every rank has the full model, and keeps and updates the optimizer state of its own shard only.

A step, on a parameter with rows A B C D and two ranks::

                    rank 0              rank 1
    parameter       A B C D             A B C D          full on both, all the time
    gradient        a b c d             a'b'c'd'         of each rank's own samples
      │ reduce: zero1 all-reduce, zero2 reduce-scatter, as soon as backward has made it
      ▼
    gradient        [a+a' b+b']         [c+c' d+d']      its shard (zero1: the other rows stay in memory as well)
      │ optimizer.step(), on these rows only
      ▼
    parameter       A*B*C D             A B C*D*         in place: the shard is a view of the full parameter
      │ all-gather
      ▼
    parameter       A*B*C*D*            A*B*C*D*

``parameters()`` of the wrapped model are the shards, as `DTensor` with ``Shard(0)``, under the names and with the full
shapes of the parameters. So every optimizer that treats each element by itself (SGD, Adam, AdamW, …) is correct, and so
are gradient clipping, GradScaler and learning-rate schedules; its state has the shape of FSDP's. Shards that a loop
updates by itself are gathered before a forward. ``state_dict()`` has the full parameters; ``module`` is the model.

With offload the shards, their gradients and so the optimizer's state and its step are on the host; the updated shard
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from mmm.parallel.dp.replicas import Part, Replicas
from mmm.parallel.local import to_local
from mmm.runtime.device import Precision
from mmm.runtime.process_group import all_gather
from mmm.torch_private.fsdp import shards_version

# PyTorch 2.13 has a new name for it, and warns of the old one.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardedParameter(Part):
    """A full parameter and the rows of it that this rank updates.

    Rank r has rows r·c … (r + 1)·c - 1 with c = ceil(rows / ranks), as ``torch.chunk`` splits; the last ranks may have
    fewer, or none.

    Attributes:
        full: the model's parameter. shard: this rank's rows of it, in the same memory.
        memory: that of `full`, padded until all ranks have the same number of rows, as collectives need it.
        host: with offload the memory of `shard`, on the host; else None.
        keep_full: sum the full gradient on every rank.
    """

    def __init__(
        self, name: str, full: nn.Parameter, mesh: DeviceMesh, keep_full: bool, host: DeviceMesh | None = None
    ) -> None:
        if full.ndim == 0:
            raise ValueError(f"parameter {name} is a scalar, which has no rows to shard: give it shape (1,)")
        rows, ranks, rank = full.shape[0], mesh.size(), mesh.get_local_rank()
        chunk = -(-rows // ranks)
        self.full, self.mesh, self.group, self.keep_full = full, host or mesh, mesh.get_group(), keep_full
        self.parameters = [full]
        self.summed: Tensor | None = None  # this rank's rows of the sum
        self.memory = full.data.new_zeros(chunk * ranks, *full.shape[1:])
        self.memory[:rows] = full.data
        full.data = self.memory[:rows]
        self.rows = slice(min(rank * chunk, rows), min((rank + 1) * chunk, rows))
        self.padded_rows = slice(rank * chunk, (rank + 1) * chunk)
        local = self.memory[self.rows]
        pinned = mesh.device_type != "cpu"
        self.host = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned).copy_(local) if host else None
        self.shard = nn.Parameter(self._as_dtensor(local if self.host is None else self.host))

    def _as_dtensor(self, rows: Tensor) -> DTensor:
        """This rank's rows as a shard of the full tensor; no copy."""
        shape, stride = self.full.shape, self.full.stride()
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def begin(self) -> dist.Work:
        """Begin to sum the gradient over the ranks; the full one of this rank's samples is freed."""
        gradient, self.full.grad = self.full.grad, None
        gradient = torch.zeros_like(self.full) if gradient is None else gradient.detach().contiguous()
        if self.keep_full:
            self.summed = gradient[self.rows]
            return dist.all_reduce(gradient, group=self.group, async_op=True)
        if len(gradient) < len(self.memory):
            gradient = torch.cat((gradient, gradient.new_zeros(len(self.memory) - len(gradient), *gradient.shape[1:])))
        local = torch.empty_like(gradient[self.padded_rows])
        self.summed = local[: self.rows.stop - self.rows.start]
        return reduce_scatter(local, gradient, group=self.group, async_op=True)

    def finish(self) -> None:
        assert self.summed is not None
        self.accumulate(self.summed)
        self.summed = None

    def accumulate(self, rows: Tensor) -> None:
        """Add to the gradient of the shard."""
        if self.host is not None:
            rows = rows.to("cpu", copy=True)
        if self.shard.grad is None:
            self.shard.grad = self._as_dtensor(rows)
        else:
            to_local(self.shard.grad).add_(rows)

    def gather(self) -> dist.Work:
        """Begin to fill in the rows that other ranks have updated."""
        if self.host is not None:
            self.memory[self.rows].copy_(self.host)
        return all_gather(self.memory, self.memory[self.padded_rows].clone(), group=self.group, async_op=True)


class Zero(Replicas):
    """ZeRO-2, or with `keep_gradients` ZeRO-1.

    One collective a parameter, overlapped with backward. With several backwards a step the shards add up; those that do
    not reduce (`sync_gradients`) keep this rank's own full gradients until one does.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, precision: Precision, keep_gradients: bool, offload: bool = False
    ) -> None:
        super().__init__(module, mesh, precision)
        self.keep_gradients, self.offload, self._gathered = keep_gradients, offload, 0
        self.sharded: dict[str, ShardedParameter] = {}

    def connect(self) -> None:
        # The same ranks, for shards on the host. It is not for sending: the group's backend may not send from there.
        host = DeviceMesh.from_group(self.mesh.get_group(), "cpu") if self.offload else None
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self.sharded[name] = ShardedParameter(name, parameter, self.mesh, self.keep_gradients, host)
        self._reduce(list(reversed(self.sharded.values())))  # as backward makes their gradients, about
        self.module.register_state_dict_pre_hook(self._refresh)
        if self.offload:
            self.module.register_load_state_dict_post_hook(lambda *_: self._to_host())
        # After the step of whichever optimizer has the shards.
        shards = {id(one.shard) for one in self.sharded.values()}
        model = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            updated = (id(p) in shards for group in optimizer.param_groups for p in group["params"])
            if (zero := model()) is not None and any(updated):
                zero.gather()

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)
        self._gathered, self.connected = self._shards_version(), True

    def _shards_version(self) -> int:
        return shards_version(one.shard for one in self.sharded.values())

    def _refresh(self, *_: Any) -> None:
        if self._shards_version() != self._gathered:
            self.gather()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._refresh()
        return super().forward(*inputs, **named)

    def _to_host(self) -> None:
        """Copy this rank's rows of the full parameters to the shards on the host."""
        for one in self.sharded.values():
            if one.host is not None:
                one.host.copy_(one.memory[one.rows])

    def _before_forward(self) -> None:
        for one in self.sharded.values():  # `requires_grad` is set on what `parameters()` has
            if one.full.requires_grad != one.shard.requires_grad:
                one.full.requires_grad_(one.shard.requires_grad)
        super()._before_forward()

    def gather(self) -> None:
        """Make the full parameters those of the shards. Done after every step of the optimizer. A collective."""
        for work in [one.gather() for one in self.sharded.values()]:
            work.wait()
        self._gathered = self._shards_version()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank: the shards, once there are any."""
        start = f"{prefix}." if prefix else ""
        shards = {id(one.full): one.shard for one in self.sharded.values()}  # a tied parameter has a second name
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield start + name, shards.get(id(parameter), parameter)
