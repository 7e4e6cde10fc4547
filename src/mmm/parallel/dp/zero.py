"""ZeRO-1 and ZeRO-2: every rank has the full model, but keeps and updates the optimizer state of only its own shard.

A step, on a parameter with rows A B C D and two ranks::

                    rank 0              rank 1
    parameter       A B C D             A B C D          full on both, all the time
    gradient        a b c d             a'b'c'd'         of each rank's own samples
      │ reduce: zero1 all-reduce, zero2 reduce-scatter, as soon as backward has made the gradient
      ▼
    gradient        [a+a' b+b']         [c+c' d+d']      its shard (zero1: the other rows stay in memory as well)
      │ optimizer.step(), on these rows only
      ▼
    parameter       A*B*C D             A B C*D*         in place: the shard is a view of the full parameter
      │ all-gather
      ▼
    parameter       A*B*C*D*            A*B*C*D*

``parameters()`` of the wrapped model are the shards, as `DTensor` with ``Shard(0)``, under the names and with the full
shapes of the parameters. So every optimizer that treats each element by itself (SGD, Adam, AdamW, …) is correct, and
so are gradient clipping, GradScaler and learning-rate schedules; the optimizer's state has the shape of FSDP's. Shards
that a training loop itself changes are gathered before the next forward. ``state_dict()`` has the full parameters;
``module`` is the model.

On a layout with more axes, each rank has what tp, pp and ep leave it of the model. The ranks that a gradient is summed
over share the update of that piece. A matrix of eight rows on dp2·tp2, its rows over tp::

                    tp 0                tp 1
    dp 0            rows 0 1 2 3        rows 4 5 6 7      in memory, of parameters and gradients
    dp 1            rows 0 1 2 3        rows 4 5 6 7
    dp 0 updates    rows 0 1            rows 4 5          and has the optimizer's state of these rows
    dp 1 updates    rows     2 3        rows     6 7

The ranks that share an update are those of dp; with cp, those of dp × cp (which have other tokens and the same
parameters); and for experts, those of expert_dp (`mmm.parallel.ep.expert_parallel`). The shards lie on a mesh (tp, dp):
tp, the outer axis, shards first. A stage of a pipeline is reduced once a step, after its micro-batches. That suits slow
links between hosts: dp sends its 3 P once a step, however many micro-batches there are, where fsdp gathers each unit's
parameters twice in each of them.

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

    Rank r has rows r·c … (r + 1)·c - 1 with c = ceil(rows / ranks), as ``torch.chunk`` splits. The last ranks may have
    fewer rows, or none.

    Attributes:
        full: the model's parameter: plain, or a `DTensor` over tp or ep.
        mesh: the mesh of the shards: the axes of `full`, then those of the ranks that share the update.
        dim: the dim of the parameter whose rows are sharded.
        keep_full: whether every rank sums the full gradient (ZeRO-1), and not just its own rows (ZeRO-2).
        group: the ranks that share the update.
        summed: this rank's rows of the summed gradient, while it is being reduced.
        local_rows: number of rows of the local tensor.
        rows: this rank's rows of its local tensor.
        padded_rows: its rows where all ranks have the same number.
        shard: the rows that this rank updates, in the same memory as `full`.
        memory: the memory of the local tensor, `dim` first, padded until all ranks have the same number of rows, as
            collectives need it.
    """

    def __init__(
        self,
        name: str,
        full: nn.Parameter,
        over: DeviceMesh,
        mesh: DeviceMesh,
        dim: int,
        *,
        keep_full: bool,
    ) -> None:
        """
        Args:
            name: the parameter's name, for an error.
            over: the ranks that have the same local tensor and share its update; one-dimensional.
        """
        if full.ndim == 0:
            raise ConfigError(f"parameter {name} is a scalar, which has no rows to shard: give it shape (1,)")
        self.full = full
        self.mesh = mesh
        self.dim = dim
        self.keep_full = keep_full
        self.group = over.get_group()
        self.summed: Tensor | None = None

        # (rows, …): the dim that is sharded comes first.
        by_rows = to_local(full.detach()).movedim(dim, 0)
        self.local_rows = len(by_rows)
        chunk = -(-self.local_rows // over.size())
        first = over.get_local_rank() * chunk
        end = first + chunk
        self.padded_rows = slice(first, end)
        self.rows = slice(min(first, self.local_rows), min(end, self.local_rows))
        # The parameter moves into padded memory, of which the shard is a view: an optimizer's step on the shard is a
        # step on the parameter.
        n_padded = chunk * over.size()
        self.memory = by_rows.new_zeros(n_padded, *by_rows.shape[1:])
        local = self.memory[: self.local_rows]
        local.copy_(by_rows)
        set_local(full, local.movedim(0, dim))
        own_rows = self.memory[self.rows]
        self.shard = nn.Parameter(self._as_dtensor(own_rows))

    def _as_dtensor(self, rows: Tensor) -> DTensor:
        """This rank's rows as a shard of the full tensor, without a copy."""
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
        """This rank's gradient of its local tensor, rows first. It is taken away from the parameter."""
        gradient = self.full.grad
        self.full.grad = None
        if gradient is None:
            # No sample of this rank has used the parameter; the others wait for this rank all the same.
            return torch.zeros_like(self.memory[: self.local_rows])
        if isinstance(self.full, DTensor):
            assert isinstance(gradient, DTensor)
            # A gradient that is a partial sum over tp, such as that of a norm, is added up: an all-reduce over tp.
            gradient = gradient.redistribute(placements=self.full.placements)
        local = to_local(gradient.detach())
        return local.movedim(self.dim, 0).contiguous()

    @torch.no_grad()
    def begin(self) -> dist.Work:
        """Begin to sum the gradient over the ranks that share the update. The full gradient of this rank's samples is
        freed."""
        gradient = self._own_gradient()
        if self.keep_full:
            # A view: the all-reduce writes the sum into it.
            self.summed = gradient[self.rows]
            return dist.all_reduce(gradient, group=self.group, async_op=True)
        # A reduce-scatter needs the same number of rows from and for each rank.
        padding = len(self.memory) - len(gradient)
        if padding:
            zeros = gradient.new_zeros(padding, *gradient.shape[1:])
            gradient = torch.cat((gradient, zeros))
        local = torch.empty_like(gradient[self.padded_rows])
        n_rows = self.rows.stop - self.rows.start
        self.summed = local[:n_rows]
        return reduce_scatter(local, gradient, group=self.group, async_op=True)

    def finish(self) -> None:
        """Add the sum, which is complete by now, to the gradient of the shard, which the optimizer reads."""
        assert self.summed is not None
        if self.shard.grad is None:
            self.shard.grad = self._as_dtensor(self.summed)
        else:
            gradient = to_local(self.shard.grad)
            gradient.add_(self.summed.movedim(0, self.dim))
        self.summed = None

    def gather(self) -> dist.Work:
        """Begin to fill in the rows that other ranks have updated: an all-gather over those that share the update."""
        # A copy, because a collective may not read where it writes.
        own_rows = self.memory[self.padded_rows].clone()
        return all_gather(self.memory, own_rows, group=self.group, async_op=True)


def replicas_of(mesh: Mesh) -> DeviceMesh:
    """The ranks that have the same parameters (except experts), and other samples or other tokens of them."""
    # `check_data_parallel` allows dp_replicate without fsdp only as the single data-parallel axis.
    if mesh.layout.dp_replicate > 1:
        return mesh["dp_replicate"]
    if mesh.layout.cp == 1:
        return mesh["dp_shard"]
    return mesh["dp_shard_cp"]


def mesh_of_shards(over: DeviceMesh, own: DeviceMesh | None) -> DeviceMesh:
    """The mesh of the shards that `over` makes of a local tensor.

    The axis that made the tensor local is the outer one, so that shards of a dim that both axes shard are consecutive.

    Args:
        over: the ranks that share the update; one-dimensional.
        own: the mesh of the parameter, one-dimensional; None if the parameter is full.
    """
    if own is None:
        return over
    groups = [own.get_group(), over.get_group()]
    own_ranks = dist.get_process_group_ranks(groups[0])
    over_ranks = dist.get_process_group_ranks(groups[1])
    # (own, over). A rank's number is a sum of terms, one for each axis. A row shares all terms but one with this rank,
    # and so does a column: this rank's number, which both contain, is subtracted once.
    ranks = [[row + column - dist.get_rank() for column in over_ranks] for row in own_ranks]
    names = (*(own.mesh_dim_names or ()), *(over.mesh_dim_names or ()))
    return DeviceMesh.from_group(groups, over.device_type, ranks, mesh_dim_names=names)


class Zero(Wrapper):
    """ZeRO-2, or with `keep_gradients` ZeRO-1.

    There is one collective for each parameter, overlapped with backward, always in the same order. A parameter's
    collective begins when its gradient is ready and all before it have begun; at the end of backward the rest begin. So
    a parameter that a rank's samples do not use counts as zero there, and the ranks' collectives are the same.

    With several backward passes a step the shards add up. Passes that do not reduce (`sync_gradients`) keep this rank's
    own full gradients until one does.
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
            experts: modules in `module` whose parameters lie on ``mesh.experts``.
            keep_gradients: whether each rank keeps the full summed gradients, as ZeRO-1 does.
        """
        self.over = replicas_of(mesh)
        tp = mesh["tp"] if mesh.layout.tp > 1 else None
        super().__init__(module, mesh_of_shards(self.over, tp), precision)
        self.experts = experts
        self.over_experts = self.over
        if mesh.experts is not None:
            self.over_experts = mesh.experts["expert_dp"]
        self.keep_gradients = keep_gradients
        self.sharded: dict[str, ShardedParameter] = {}
        # The version of the shards that the full parameters were gathered from: it changes with each write to a shard.
        self._gathered = 0
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        # The order of the collectives, the same on every rank, and the index of the one to begin next.
        self._order: list[ShardedParameter] = []
        self._next = 0
        # Parameters with a gradient from the backward under way.
        self._arrived: set[ShardedParameter] = set()
        self._begun: list[tuple[ShardedParameter, dist.Work]] = []
        self._in_backward = False

    def connect(self) -> None:
        experts = {id(parameter) for module in self.experts for parameter in module.parameters()}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                is_expert = id(parameter) in experts
                self.sharded[name] = self._shard(name, parameter, is_expert)
        # About the order in which backward makes the gradients.
        self._order = list(reversed(self.sharded.values()))
        for sharded in self._order:
            sharded.full.register_post_accumulate_grad_hook(lambda _, sharded=sharded: self._arrive(sharded))
        self.sum_gradients_of([sharded.full for sharded in self._order])
        self.module.register_state_dict_pre_hook(self._refresh)
        shards = {id(sharded.shard) for sharded in self._order}
        # PyTorch keeps the hook below for good: it must not keep this model alive.
        model = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            """Gather after the step of whichever optimizer has the shards."""
            zero = model()
            updated: set[int] = set()
            for group in optimizer.param_groups:
                updated |= {id(parameter) for parameter in group["params"]}
            if zero is not None and updated & shards:
                zero.gather()

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)
        self._gathered = self._shards_version()
        self.connected = True

    def _shard(self, name: str, full: nn.Parameter, is_expert: bool) -> ShardedParameter:
        over = self.over
        dim = 0
        if is_expert:
            over = self.over_experts
            dim = expert_dim(full, over.size())
        own = full.device_mesh if isinstance(full, DTensor) else None
        axes: tuple[str, ...] = over.mesh_dim_names or ()
        if own is not None:
            axes = (*(own.mesh_dim_names or ()), *axes)
        # Parameters with the same axes share a mesh: each mesh holds a list of ranks.
        if axes not in self._meshes:
            self._meshes[axes] = mesh_of_shards(over, own)
        return ShardedParameter(name, full, over, self._meshes[axes], dim, keep_full=self.keep_gradients)

    def _shards_version(self) -> int:
        return shards_version(sharded.shard for sharded in self._order)

    def _refresh(self, *_: Any) -> None:
        """Gather, if something else than an optimizer has changed the shards."""
        if self._shards_version() != self._gathered:
            self.gather()

    def compute(self, *inputs: Any, **named: Any) -> Any:
        self._refresh()
        if torch.is_grad_enabled():
            # A program sets `requires_grad` on what `parameters()` returns: the shards.
            for sharded in self._order:
                sharded.full.requires_grad_(sharded.shard.requires_grad)
            self.refuse_thawed()
            # A backward that has failed leaves its state.
            self._forget()
        return self.module(*inputs, **named)

    def reduce_gradients(self) -> None:
        """Sum over the ranks the gradients that backward passes without a reduction have left. A collective of the
        ranks that share the updates."""
        self._forget()
        self._finish()

    def _forget(self) -> None:
        self._in_backward = False
        self._next = 0
        self._arrived.clear()
        self._begun.clear()

    def _arrive(self, sharded: ShardedParameter) -> None:
        """Runs when backward has added to the gradient of a parameter."""
        if not self.reduce_now:
            return
        if not self._in_backward:
            self._forget()
            self._in_backward = True
            at_end_of_backward(self._finish)
        self._arrived.add(sharded)
        while self._next < len(self._order):
            if self._order[self._next] not in self._arrived:
                break
            self._begin_next()

    def _begin_next(self) -> None:
        sharded = self._order[self._next]
        self._next += 1
        if sharded.full.requires_grad:
            self._begun.append((sharded, sharded.begin()))

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of a backward, begin what is left, and wait for all of it."""
        while self._next < len(self._order):
            self._begin_next()
        for sharded, work in self._begun:
            work.wait()
            sharded.finish()
        self._forget()

    def gather(self) -> None:
        """Make the full parameters those of the shards: after every step of the optimizer.

        A collective of the ranks that share the updates. All parameters' gathers begin before the first is waited for.
        """
        works = [sharded.gather() for sharded in self.sharded.values()]
        for work in works:
            work.wait()
        self._gathered = self._shards_version()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank: the shards, once there are any."""
        start = f"{prefix}." if prefix else ""
        # By id, because a tied parameter has a second name.
        shards = {id(sharded.full): sharded.shard for sharded in self._order}
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield start + name, shards.get(id(parameter), parameter)
