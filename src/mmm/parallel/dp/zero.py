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

On a layout with more axes each rank has what tp, pp and ep leave it of the model. The ranks that a gradient is summed
over share the update of that. A matrix of eight rows on dp2·tp2, its rows over tp::

                    tp 0                tp 1
    dp 0            rows 0 1 2 3        rows 4 5 6 7      in memory, of parameters and gradients
    dp 1            rows 0 1 2 3        rows 4 5 6 7
    dp 0 updates    rows 0 1            rows 4 5          with the optimizer's state of these
    dp 1 updates    rows     2 3        rows     6 7

Those ranks are dp, with cp dp × cp (whose ranks have other tokens and the same parameters), and for experts expert_dp
(`mmm.parallel.ep.expert_parallel`). The shards are those of a mesh (tp, dp): tp, outer, shards first. A stage of a
pipeline is reduced once a step, after its micro-batches. That suits slow links between hosts: dp sends its 3 P once a
step, however many micro-batches there are, where fsdp gathers each unit's parameters twice in each.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from mmm.errors import ConfigError
from mmm.parallel.dp.wrapped import Wrapper
from mmm.parallel.ep.expert_parallel import expert_dim
from mmm.parallel.local import to_local
from mmm.parallel.mesh import Mesh
from mmm.runtime.device import Precision
from mmm.runtime.process_group import all_gather, reduce_scatter
from mmm.torch_private.autograd import at_end_of_backward
from mmm.torch_private.fsdp import set_local, shards_version


class ShardedParameter:
    """A rank's local tensor of a parameter, and the rows of it that this rank updates.

    Rank r has rows r·c … (r + 1)·c - 1 with c = ceil(rows / ranks), as ``torch.chunk`` splits; the last ranks may have
    fewer, or none.

    Attributes:
        full: the model's parameter: plain, or a `DTensor` over tp or ep.
        shard: this rank's rows of its local tensor, in the same memory.
        memory: that of the local tensor, `dim` first, padded until all ranks have the same number of rows, as
            collectives need it.
        keep_full: sum the full gradient on every rank.
    """

    def __init__(
        self, name: str, full: nn.Parameter, over: DeviceMesh, mesh: DeviceMesh, dim: int, *, keep_full: bool
    ) -> None:
        """
        Args:
            over: the ranks that have the same local tensor, one-dimensional.
            mesh: of the shards: the axes of `full`, then `over`. dim: whose rows are sharded.
        """
        if full.ndim == 0:
            raise ConfigError(f"parameter {name} is a scalar, which has no rows to shard: give it shape (1,)")
        self.full = full
        self.mesh = mesh
        self.dim = dim
        self.keep_full = keep_full
        self.group = over.get_group()
        self.summed: Tensor | None = None  # this rank's rows of the sum

        by_rows = to_local(full.detach()).movedim(dim, 0)
        self.local_rows = len(by_rows)
        chunk = -(-self.local_rows // over.size())
        first = over.get_local_rank() * chunk
        self.padded_rows = slice(first, first + chunk)
        self.rows = slice(min(first, self.local_rows), min(first + chunk, self.local_rows))
        self.memory = by_rows.new_zeros(chunk * over.size(), *by_rows.shape[1:])
        self.memory[: self.local_rows] = by_rows
        set_local(full, self.memory[: self.local_rows].movedim(0, dim))
        self.shard = nn.Parameter(self._as_dtensor(self.memory[self.rows]))

    def _as_dtensor(self, rows: Tensor) -> DTensor:
        """This rank's rows as a shard of the full tensor; no copy."""
        outer = self.full.placements if isinstance(self.full, DTensor) else ()
        return DTensor.from_local(
            rows.movedim(0, self.dim),
            self.mesh,
            [*outer, Shard(self.dim)],
            run_check=False,
            shape=self.full.shape,
            stride=self.full.stride(),
        )

    def _own_gradient(self) -> Tensor:
        """This rank's gradient of its local tensor, rows first; it is taken from the parameter."""
        gradient = self.full.grad
        self.full.grad = None
        if gradient is None:
            return torch.zeros_like(self.memory[: self.local_rows])
        if isinstance(self.full, DTensor):  # a partial sum over tp, such as that of a norm, is added up
            assert isinstance(gradient, DTensor)
            gradient = gradient.redistribute(placements=self.full.placements)
        return to_local(gradient.detach()).movedim(self.dim, 0).contiguous()

    @torch.no_grad()
    def begin(self) -> dist.Work:
        """Begin to sum the gradient over the ranks; the full one of this rank's samples is freed."""
        gradient = self._own_gradient()
        if self.keep_full:
            self.summed = gradient[self.rows]
            return dist.all_reduce(gradient, group=self.group, async_op=True)
        padding = len(self.memory) - len(gradient)
        if padding:
            gradient = torch.cat((gradient, gradient.new_zeros(padding, *gradient.shape[1:])))
        local = torch.empty_like(gradient[self.padded_rows])
        self.summed = local[: self.rows.stop - self.rows.start]
        return reduce_scatter(local, gradient, group=self.group, async_op=True)

    def finish(self) -> None:
        """Add the sum, which is there by now, to the gradient of the shard, which the optimizer reads."""
        assert self.summed is not None
        if self.shard.grad is None:
            self.shard.grad = self._as_dtensor(self.summed)
        else:
            to_local(self.shard.grad).add_(self.summed.movedim(0, self.dim))
        self.summed = None

    def gather(self) -> dist.Work:
        """Begin to fill in the rows that other ranks have updated."""
        return all_gather(self.memory, self.memory[self.padded_rows].clone(), group=self.group, async_op=True)


def replicas_of(mesh: Mesh) -> DeviceMesh:
    """The ranks that have the same parameters, experts apart, and other samples or other tokens of them."""
    if mesh.layout.dp_replicate > 1:  # `check_data_parallel`: it is then the only axis
        return mesh["dp_replicate"]
    return mesh["dp_shard" if mesh.layout.cp == 1 else "dp_shard_cp"]


def mesh_of_shards(over: DeviceMesh, own: DeviceMesh | None) -> DeviceMesh:
    """The mesh of what `over` shards of a local tensor: the axis that made it local is the outer one, so that shards of
    a dim that both shard are consecutive.

    Args:
        over: one-dimensional. own: the same, of the parameter; None: it is full.
    """
    if own is None:
        return over
    groups = [own.get_group(), over.get_group()]
    own_ranks, over_ranks = map(dist.get_process_group_ranks, groups)
    # A rank is a sum of terms, one an axis.
    ranks = [[row + column - dist.get_rank() for column in over_ranks] for row in own_ranks]
    names = (*(own.mesh_dim_names or ()), *(over.mesh_dim_names or ()))
    return DeviceMesh.from_group(groups, over.device_type, ranks, mesh_dim_names=names)


class Zero(Wrapper):
    """ZeRO-2, or with `keep_gradients` ZeRO-1.

    One collective a parameter, overlapped with backward, always in the same order: a parameter's begins when its
    gradient is there and all before it have begun, and at the end of backward those begin that are left. So a parameter
    that a rank's samples do not use counts as zero there, and the ranks' collectives are the same.

    With several backwards a step the shards add up; those that do not reduce (`sync_gradients`) keep this rank's own
    full gradients until one does.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        precision: Precision,
        experts: Sequence[nn.Module] = (),
        *,
        keep_gradients: bool,
    ) -> None:
        """
        Args:
            experts: modules in `module` whose parameters are those of ``mesh.experts``.
        """
        self.over = replicas_of(mesh)
        tp = mesh["tp"] if mesh.layout.tp > 1 else None
        super().__init__(module, mesh_of_shards(self.over, tp), precision)
        self.experts = experts
        self.over_experts = mesh.experts["expert_dp"] if mesh.experts is not None else self.over
        self.keep_gradients = keep_gradients
        self.sharded: dict[str, ShardedParameter] = {}
        self._gathered = 0  # version of the shards that the full parameters have
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._order: list[ShardedParameter] = []  # of their collectives
        self._next = 0  # in `_order`, to begin next
        self._arrived: set[ShardedParameter] = set()  # have a gradient, in the backward that is under way
        self._begun: list[tuple[ShardedParameter, dist.Work]] = []
        self._in_backward = False

    def connect(self) -> None:
        experts = {id(parameter) for module in self.experts for parameter in module.parameters()}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self.sharded[name] = self._shard(name, parameter, id(parameter) in experts)
        self._order = list(reversed(self.sharded.values()))  # as backward makes their gradients, about
        for one in self._order:
            one.full.register_post_accumulate_grad_hook(lambda _, one=one: self._arrive(one))
        self.sum_gradients_of([one.full for one in self._order])
        self.module.register_state_dict_pre_hook(self._refresh)
        # After the step of whichever optimizer has the shards.
        shards = {id(one.shard) for one in self._order}
        model = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            zero = model()
            updated = (id(p) in shards for group in optimizer.param_groups for p in group["params"])
            if zero is not None and any(updated):
                zero.gather()

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)
        self._gathered = self._shards_version()
        self.connected = True

    def _shard(self, name: str, full: nn.Parameter, is_expert: bool) -> ShardedParameter:
        over = self.over_experts if is_expert else self.over
        dim = expert_dim(full, over.size()) if is_expert else 0
        own = full.device_mesh if isinstance(full, DTensor) else None
        axes = tuple(axis for mesh in (own, over) if mesh is not None for axis in mesh.mesh_dim_names or ())
        if axes not in self._meshes:
            self._meshes[axes] = mesh_of_shards(over, own)
        return ShardedParameter(name, full, over, self._meshes[axes], dim, keep_full=self.keep_gradients)

    def _shards_version(self) -> int:
        return shards_version(one.shard for one in self._order)

    def _refresh(self, *_: Any) -> None:
        if self._shards_version() != self._gathered:
            self.gather()

    def compute(self, *inputs: Any, **named: Any) -> Any:
        self._refresh()
        if torch.is_grad_enabled():
            for one in self._order:  # `requires_grad` is set on what `parameters()` has
                one.full.requires_grad_(one.shard.requires_grad)
            self.refuse_thawed()
            self._forget()  # a backward that has failed leaves its state
        return self.module(*inputs, **named)

    def reduce_gradients(self) -> None:
        """Sum over the ranks what backwards that do not have left. A collective."""
        self._forget()
        self._finish()

    def _forget(self) -> None:
        self._in_backward = False
        self._next = 0
        self._arrived.clear()
        self._begun.clear()

    def _arrive(self, one: ShardedParameter) -> None:
        """Backward has added to a gradient."""
        if not self.reduce_now:
            return
        if not self._in_backward:
            self._forget()
            self._in_backward = True
            at_end_of_backward(self._finish)
        self._arrived.add(one)
        while self._next < len(self._order) and self._order[self._next] in self._arrived:
            self._begin_next()

    def _begin_next(self) -> None:
        one = self._order[self._next]
        self._next += 1
        if one.full.requires_grad:
            self._begun.append((one, one.begin()))

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward."""
        while self._next < len(self._order):
            self._begin_next()
        for one, work in self._begun:
            work.wait()
            one.finish()
        self._forget()

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
        shards = {id(one.full): one.shard for one in self._order}  # a tied parameter has a second name
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield start + name, shards.get(id(parameter), parameter)
