"""FSDP where ranks' forwards differ: each gathers all units in one order, whichever of them its own samples use.

Two ranks of a model with units A B C D, of which B is for some samples and C for others::

    rank 0 calls   A   B       D         gathers   A B [C] D
    rank 1 calls   A       C   D         gathers   A [B] C D

A unit that is passed over is gathered before the next one that is called, or at the end of forward. Then the ranks
compare what they have called. If it differs, backward cannot gather and reduce as it goes, since each rank would do so
in another order: all units are gathered before it, and reduced at its end. Such a step takes the memory of full
parameters and gradients. Where all ranks have called the same, all is as FSDP does it.

The comparison is a small collective after each forward, which the host waits for. A unit that is called again, and has
been freed, is gathered again: that takes all ranks, which make sure of it first. A plan with ``uniform`` has none of
this.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from mmm.errors import LayoutError
from mmm.parallel.dp.outputs import adds_to_leaves, tensors_in
from mmm.parallel.dp.wrapped import all_groups
from mmm.parallel.local import to_group_device
from mmm.runtime.log import get_logger
from mmm.torch_private.autograd import at_end_of_backward, in_backward
from mmm.torch_private.fsdp import (
    end_backward,
    groups_of,
    reshards_after_forward,
    shards_version,
    state_of,
    unsharded_of,
)


class UnitOrder:
    """Hooks of a model whose units FSDP shards.

    Attributes:
        order: the units' numbers as they are gathered, the same on every rank.
        calls: the numbers of the units that this rank's forward has called, in turn.
    """

    def __init__(self, model: FSDPModule, mesh: DeviceMesh) -> None:
        """
        Args:
            model: sharded. mesh: of one or more axes, whose ranks have different samples.
        """
        assert isinstance(model, nn.Module)
        self.model, self.mesh = model, mesh
        self.units: list[FSDPModule] = []
        self.names: list[str] = []
        unit_ids: dict[Any, int] = {}  # modules of one unit have one state
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule) or module is model:
                continue
            unit_id = unit_ids.setdefault(state_of(module), len(self.units))
            if unit_id == len(self.units):
                self.units.append(module)
                self.names.append(name)
            else:
                self.names[unit_id] += f" and {name}"
            module.register_forward_pre_hook(lambda *_, n=unit_id: self._reach(n), prepend=True)  # type: ignore[attr-defined]
        self.order = list(range(len(self.units)))
        self.calls: list[int] = []
        self._place = 0  # in `order`, of the unit to gather next
        self._passed: set[int] = set()  # gathered, and not called so far
        self._inside = self._deferred = self._queued = self._told = False
        self._sync = True
        model.register_forward_pre_hook(lambda *_: self._start(), prepend=True)
        model.register_forward_hook(lambda _, inputs, output: self._end(output))

    def _start(self) -> None:
        self._inside, self._place = True, 0
        self.calls.clear()
        self._passed.clear()

    def _reach(self, unit_id: int) -> None:
        """Before a unit is called, and FSDP gathers it."""
        if not self._inside or in_backward():  # what is recomputed in backward is gathered
            return
        again = unit_id in self.calls and not all(group.is_unsharded for group in groups_of(self.units[unit_id]))
        self.calls.append(unit_id)
        place = self.order.index(unit_id)
        self._gather(len(self.order) if again and self.mesh.size() > 1 else place)
        if again and self.mesh.size() > 1:
            self._alike(again=unit_id)
        self._place = max(self._place, place + 1)
        self._passed.discard(unit_id)

    def _gather(self, stop: int) -> None:
        for unit_id in self.order[self._place : stop]:
            self.units[unit_id].unshard()
            self._passed.add(unit_id)
        self._place = max(self._place, stop)

    def _end(self, output: Any) -> None:
        """After the model's forward."""
        self._inside = False
        self._gather(len(self.order))
        for unit in (self.units[unit_id] for unit_id in self.order if unit_id in self._passed):
            if any(reshards_after_forward(group) for group in groups_of(unit)):
                unit.reshard()
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not self._communicates():
            return
        alike = self._alike()
        if not torch.is_grad_enabled():
            return
        if alike and not self._deferred:
            self.order = list(dict.fromkeys((*self.calls, *self.order)))
        else:
            self._defer(outputs)

    def _communicates(self) -> bool:
        """Whether backward does: in a pipeline it does not, nor alone."""
        groups = all_groups(self.model)
        return self.mesh.size() > 1 and any(group.reduce_grads or reshards_after_forward(group) for group in groups)

    def _alike(self, again: int | None = None) -> bool:
        """Whether all ranks have called the same units in the same order. A collective.

        Args:
            again: the unit that is about to be gathered again; None at the end of forward.

        Raises:
            LayoutError: some ranks are at the end of forward, or about to gather another unit.
        """
        digest = zlib.crc32(repr(self.calls if again is None else again).encode())
        ends = torch.tensor([digest, -digest])
        for axis in range(self.mesh.ndim):
            group = self.mesh.get_group(axis)
            ends = to_group_device(ends, group)
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        most, least = ends.tolist()
        if most != -least:
            self._tell(again)
        return most == -least

    def _tell(self, again: int | None) -> None:
        """Name the units that some ranks have called, the first time. A collective. Raises as `_alike`."""
        counts = [self.calls.count(unit_id) for unit_id in range(len(self.units))]
        calls_by_rank = {dist.get_rank(): (again, counts)}
        for axis in range(self.mesh.ndim):
            group = self.mesh.get_group(axis)
            gathered: list = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, calls_by_rank, group=group)
            calls_by_rank = {rank: counts_of_rank for part in gathered for rank, counts_of_rank in part.items()}
        if len({unit for unit, _ in calls_by_rank.values()}) > 1:
            places = ", ".join(
                f"rank {rank} {'ends' if unit is None else f'calls {self.names[unit]} again'}"
                for rank, (unit, _) in sorted(calls_by_rank.items())
            )
            raise LayoutError(
                f"ranks call FSDP's units a different number of times ({places}), and a unit that is called again is "
                f"gathered again, which takes all ranks: leave it out of the plan's fsdp_units, or use zero2",
                on_every_rank=True,
            )
        if self._told:
            return
        self._told = True
        uneven = []
        for unit_id, name in enumerate(self.names):
            without = [
                str(rank) for rank, (_, counts_of_rank) in sorted(calls_by_rank.items()) if not counts_of_rank[unit_id]
            ]
            if 0 < len(without) < len(calls_by_rank):
                uneven.append(f"{name} (not by rank {', '.join(without)})")
        if dist.get_rank() == min(calls_by_rank):
            get_logger().warning(
                "FSDP's units are not called alike by all ranks: %s. In such a step every rank keeps all parameters "
                "and gradients until backward ends",
                ", ".join(uneven) or "their order differs",
            )

    def _defer(self, outputs: Sequence[Tensor]) -> None:
        """Gather all units, and have them reduced at the end of the next backward."""
        for unit_id in self.order:
            self.units[unit_id].unshard()
        if not self._deferred:
            self._deferred = True
            self._sync = any(group.reduce_grads for group in all_groups(self.model))
            self.model.set_requires_gradient_sync(False)
            self.model.set_reshard_after_backward(False)
        for tensor in outputs:
            tensor.register_hook(lambda _, node=tensor.grad_fn: self._backward(node))

    def _backward(self, node: torch.autograd.graph.Node) -> None:
        """A backward has reached an output of the model; FSDP's own hook has been called before."""
        if self._deferred and not self._queued and adds_to_leaves(node):
            self._queued = True
            at_end_of_backward(self._finish)

    def _finish(self) -> None:
        """At the end of a backward: reduce as it would have done, in one order, and free the units."""
        self._queued = self._deferred = False
        self.model.set_reshard_after_backward(True)
        self.model.set_requires_gradient_sync(self._sync)
        units = [*(self.units[unit_id] for unit_id in reversed(self.order)), self.model]
        if not self._sync:
            for unit in units:
                unit.reshard()
            return
        for unit in units:
            for group in groups_of(unit):
                group.post_backward()
        end_backward(self.model)


def reduce_unused(group: Any) -> None:
    """Have FSDP reduce all gradients of a unit where it reduces any: one that a rank's samples have not used is zero.
    FSDP itself would leave it out, on this rank alone. It may end a unit twice in a backward (PyTorch 2.11 does, a unit
    of several modules): the second time, before the unit is gathered again, nothing is zero but reduced.

    Args:
        group: of `groups_of`.
    """
    reduce, gather, reduced = group.post_backward, group.unshard, False

    def unshard(*args: Any, **kwargs: Any) -> None:
        nonlocal reduced
        reduced = False
        gather(*args, **kwargs)

    def post_backward(*unused: Any) -> None:
        nonlocal reduced
        if group.reduce_grads and not reduced:
            reduced = True
            used = [(p, unsharded_of(p)) for p in group.fsdp_params if p.sharded_param.requires_grad]
            gathered = [(p, unsharded) for p, unsharded in used if unsharded is not None]
            # In the dtype that they are summed in.
            several = any(p.unsharded_accumulated_grad is not None for p, _ in gathered)
            for p, unsharded in gathered:
                if unsharded.grad is None and p.unsharded_accumulated_grad is None:
                    unsharded.grad = torch.zeros_like(unsharded)
                if several and p.unsharded_accumulated_grad is None:
                    p.to_accumulated_grad_if_needed()
        reduce(*unused)

    group.unshard, group.post_backward = unshard, post_backward


def follow_shards(model: FSDPModule) -> None:
    """Have what is gathered follow the shards, which `parameters` has, before each forward: ``requires_grad``, and the
    values where FSDP has left a unit gathered (after a forward without backward) and an optimizer has made a step."""
    assert isinstance(model, nn.Module)
    gathered: dict[Any, int] = {}  # the shards' versions of which a unit is gathered

    def version(group: Any) -> int:
        return shards_version(p.sharded_param for p in group.fsdp_params)

    def each() -> Iterator[tuple[FSDPModule, Any]]:
        units = (module for module in model.modules() if isinstance(module, FSDPModule))
        return ((unit, group) for unit in units for group in groups_of(unit))

    def before(*_: Any) -> None:
        for unit, group in each():
            if group.is_unsharded and gathered.get(group) not in (None, version(group)):
                unit.reshard()
            for p in group.fsdp_params:
                unsharded = unsharded_of(p)
                if unsharded is not None:
                    unsharded.requires_grad_(p.sharded_param.requires_grad)

    def after(*_: Any) -> None:
        gathered.clear()
        gathered.update((group, version(group)) for _, group in each() if group.is_unsharded)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)
