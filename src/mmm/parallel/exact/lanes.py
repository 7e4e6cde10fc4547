"""One axis of the mesh whose computation is split into lanes: collectives that move bytes, and sums by a tree.

A *lane* is a rank of a mesh that need not exist: the canonical partition has so many along each axis, and every mesh
computes each lane by the same calls on tensors of the same shape. A rank has consecutive lanes. What it computes for
one lane never depends on how many others it has, because a kernel's result may depend on what else is in the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.exact.trees import sum_near
from mmm.parallel.tp.replicated import Owners
from mmm.runtime import process_group
from mmm.torch_private.module import own_parameters


class LaneAxis:
    """The lanes of an axis of the mesh, and the ranks that share them.

    Attributes:
        total: number of lanes over all ranks of the axis.
        size: number of ranks.
        rank: coordinate of this rank on the axis.
        lanes: number of lanes of each rank.
        group: the ranks of the axis. None where there is only one.
    """

    def __init__(self, total: int, mesh: DeviceMesh | None = None) -> None:
        """
        Args:
            total: number of lanes, a multiple of the number of ranks.
            mesh: one-dimensional mesh of the axis. None: one rank has all lanes.
        """
        self.total = total
        self.size = 1
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        if mesh is not None and mesh.size() > 1:
            self.size = mesh.size()
            self.rank = mesh.get_local_rank()
            self.group = mesh.get_group()
        self.lanes = total // self.size

    @property
    def first_lane(self) -> int:
        """Number of this rank's first lane, among all lanes of the axis."""
        return self.rank * self.lanes

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks of the axis, by coordinate. A collective; all have the same shape."""
        if self.group is None:
            return [tensor]
        return all_gather(tensor, self.group)

    def all_to_all(self, pieces: Tensor) -> list[Tensor]:
        """Send piece r to rank r, and receive one from each rank, by coordinate. A collective.

        Args:
            pieces: (ranks of the axis, …).
        """
        if self.group is None:
            # Only this rank's own.
            return [pieces[0]]
        return all_to_all(pieces, self.group)

    def sum(self, terms: Sequence[Tensor]) -> Tensor:
        """Add up a term of each lane of the axis, by the near tree: the sum is on every rank. A collective.

        Args:
            terms: one for each lane of this rank.
        """
        own = sum_near(terms)
        # A rank's lanes are neighbours, so each rank's sum is a node of the tree over all lanes.
        by_rank = self.all_gather(own)
        return sum_near(by_rank)

    def sum_scattered(self, dim: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """Add up a term of each lane of the axis, by the near tree: each lane of this rank gets its chunk along `dim`.

        A collective: each rank sends what it has added up of its own lanes, and the receiver adds the rest.

        Args:
            dim: a dim whose size the number of lanes divides.
            terms: one for each lane of this rank.
        """
        own = sum_near(terms)
        # (ranks of the axis, …): piece r has the chunks of rank r's lanes.
        pieces = torch.stack(own.chunk(self.size, dim))
        by_rank = self.all_to_all(pieces)
        total = sum_near(by_rank)
        chunks = total.chunk(self.lanes, dim)
        return [chunk.contiguous() for chunk in chunks]


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of a group, by rank. A collective that moves bytes, of any dtype."""
    tensor = tensor.contiguous()
    # (ranks, …)
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    process_group.all_gather(_bytes_of(gathered), _bytes_of(tensor), group=group)
    return list(gathered.unbind())


def all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Send piece r to rank r, and receive one from each rank. A collective that moves bytes, of any dtype.

    Args:
        pieces: (ranks, …).
    """
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(_bytes_of(received), _bytes_of(pieces), group=group)
    return list(received.unbind())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, as bytes: a flat view."""
    # Backends take bytes where they do not know a dtype, and move them unchanged.
    return tensor.view(-1).view(torch.uint8)


def chunks_of(x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    """Split a tensor into chunks along a dim, each in memory of its own.

    A view of the full tensor would have other strides, or another alignment, on another mesh, and a kernel may then
    return other bits.
    """
    # A plain clone would keep the strides of a view that is dense.
    chunks = x.chunk(count, dim)
    return tuple(chunk.clone(memory_format=torch.contiguous_format) for chunk in chunks)


@contextmanager
def computing_with(owners: Owners, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Have modules find a lane's tensors in place of their parameters, in this block.

    Args:
        owners: the parameters, by name.
        tensors: one for each name.
    """
    before = []
    try:
        for name, (owner, own_name) in owners.items():
            parameters: Any = own_parameters(owner)
            before.append((parameters, own_name, parameters[own_name]))
            parameters[own_name] = tensors[name]
        yield
    finally:
        for parameters, own_name, parameter in before:
            parameters[own_name] = parameter


class SplitChunks(torch.autograd.Function):
    """A tensor → its `chunks_of` along `dim`. Backward joins their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return chunks_of(x, count, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # No gradient for `count` and `dim`.
        return torch.cat(gradients, ctx.dim), None, None


class JoinChunks(torch.autograd.Function):
    """Chunks → the tensor that has them along `dim`. Backward splits, as `SplitChunks` does."""

    @staticmethod
    def forward(ctx: Any, dim: int, *chunks: Tensor) -> Tensor:
        ctx.dim = dim
        ctx.count = len(chunks)
        return torch.cat(chunks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *chunks_of(gradient, ctx.count, ctx.dim)


class GatherLanes(torch.autograd.Function):
    """Chunks along `dim`, one a lane → for each lane the full tensor. Backward sums over the lanes, and scatters."""

    @staticmethod
    def forward(ctx: Any, axis: LaneAxis, dim: int, *chunks: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.dim = dim
        own = torch.cat(chunks, dim)
        by_rank = axis.all_gather(own)
        full = torch.cat(by_rank, dim)
        # Each lane needs a tensor of its own, so that backward has a gradient for each. They share memory.
        return tuple(full.detach() for _ in chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # No gradient for `axis` and `dim`.
        return None, None, *ctx.axis.sum_scattered(ctx.dim, gradients)


class ScatterSum(torch.autograd.Function):
    """Terms, one a lane → for each lane its chunk along `dim` of their sum. Backward gathers."""

    @staticmethod
    def forward(ctx: Any, axis: LaneAxis, dim: int, *terms: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.dim = dim
        return tuple(axis.sum_scattered(dim, terms))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        own = torch.cat(gradients, ctx.dim)
        by_rank = ctx.axis.all_gather(own)
        full = torch.cat(by_rank, ctx.dim)
        return None, None, *(full.detach() for _ in gradients)


class FanOut(torch.autograd.Function):
    """One tensor → one for each lane of this rank. Backward adds their gradients up by the near tree.

    With an axis, backward also adds over its ranks: for a tensor that all of them have, such as a norm's weight. With a
    dtype, lanes get the tensor in that dtype, and their gradients are added up in the tensor's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        lanes: int,
        axis: LaneAxis | None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.dtype = tensor.dtype
        if dtype is None:
            dtype = tensor.dtype
        cast = tensor.to(dtype)
        return tuple(cast.detach() for _ in range(lanes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # The tree rounds in the tensor's own dtype at every level.
        wide = [gradient.to(ctx.dtype) for gradient in gradients]
        if ctx.axis is None:
            total = sum_near(wide)
        else:
            total = ctx.axis.sum(wide)
        return total, None, None, None
