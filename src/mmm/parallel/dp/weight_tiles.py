"""Large matrices gathered in tiles: of a layer's weights, a rank has one tile at a time.

FSDP gathers all parameters of a layer at once, and the layer after it on top. Here each large `Linear` is gathered for
itself, tile by tile; a tile is used and freed before the next is gathered, in forward, and once more in backward::

    W (out, in), sharded over 4 ranks by rows       ┌ 0 0 0 ┐ rank 0      a tile: the rows i of every rank's shard
                                                    │ 1 1 1 │ rank 1        ┌ 0 ┐
      all-gather of one tile                        │ 2 2 2 │ rank 2        │ 1 │
      y[:, its columns] = x @ tileᵀ                 └ 3 3 3 ┘ rank 3        │ 2 │
                                                      │ │ └ tile 2          └ 3 ┘
      backward, tile by tile: gather again, dx += dy[:, its columns] @ tile,
      and the tile's gradient dy[:, its columns]ᵀ @ x, reduce-scattered: rows i of every rank's gradient

So a rank's shard is what it is under FSDP, and so are its name, its gradient and its optimizer's state: checkpoints,
weights in and out and optimizers do not know of tiles. What is saved is gathered parameters and unsharded gradients
(and not activations: `mmm.parallel.memory.tiling`). What it costs: N times as many collectives, which nothing hides;
with several micro-batches each one's gradients are reduced, and in a pipeline each one gathers. With offload a tile at
a time comes up from the host.

Source: Rajbhandari et al., "ZeRO-Infinity", 2021 (memory-centric tiling), whose tiles are modules and parameters of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from mmm.errors import ConfigError, config_field
from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.parallel.plan import Plan, find
from mmm.runtime.process_group import all_gather, reduce_scatter


class TiledLinear(nn.Linear):
    """Replaces a `Linear`, with its parameters under the same names. Until `shard_tiled_weights` it computes as one.

    Attributes:
        tiles: of the weight. dtype: to compute in. mesh: that its rows are sharded over; None: not yet.
    """

    weight: nn.Parameter

    def __init__(self, linear: nn.Linear, tiles: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.tiles, self.dtype = linear.get_parameter("weight"), tiles, dtype
        self.register_parameter("bias", linear.bias)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out). Under tp a DTensor: columns or rows of the matrix are this rank's."""
        if self.mesh is None:
            return super().forward(x)
        weight = self.weight
        assert isinstance(weight, DTensor)
        shard, shape = weight.to_local(), list(weight.shape)  # (rows of this rank, in)
        if not isinstance(x, DTensor):
            y = _TiledProduct.apply(x, shard, _Tiles(self.mesh, shape[0], self.tiles, self.dtype))
        else:
            by_columns = weight.placements[-1].is_shard(0)  # of the matrix, whose columns are the weight's rows
            local = x.to_local(grad_placements=[Partial()] if by_columns else list(x.placements))
            rows = -(-shape[0] // x.device_mesh.size()) if by_columns else shape[0]
            own = _TiledProduct.apply(local, shard, _Tiles(self.mesh, rows, self.tiles, self.dtype))
            y = DTensor.from_local(
                own, x.device_mesh, [Shard(x.ndim - 1) if by_columns else Partial()], run_check=False
            )
        return y if self.bias is None else y + self.bias


class _Tiles:
    """The tiles of a matrix of `rows` rows, sharded over the last axis of a mesh as ``torch.chunk`` splits them.

    Attributes:
        ranks: that it is sharded over. chunk: rows of a rank's shard, of the largest.
    """

    def __init__(self, mesh: DeviceMesh, rows: int, tiles: int, dtype: torch.dtype) -> None:
        self.group, self.ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self.replicas = mesh.get_group(0) if mesh.ndim > 1 else None
        self.rows, self.dtype = rows, dtype
        self.chunk = -(-rows // self.ranks)
        self.tiles = min(tiles, self.chunk)

    def slices(self) -> Iterator[slice]:
        """Of a rank's shard, none empty."""
        for tile in range(self.tiles):
            yield slice(self.chunk * tile // self.tiles, self.chunk * (tile + 1) // self.tiles)

    def gather(self, shard: Tensor, rows: slice, device: torch.device) -> Tensor:
        """These rows of every rank's shard, (ranks · rows, in), on the device that computes."""
        own = shard[rows].to(device, self.dtype)
        if missing := rows.stop - rows.start - len(own):  # the last ranks may have less
            own = F.pad(own, (0, 0, 0, missing))
        if self.ranks == 1:
            return own
        tile = own.new_empty(self.ranks * len(own), own.shape[1])
        all_gather(tile, own, group=self.group)
        return tile

    def reduce(self, gradient: Tensor) -> Tensor:
        """The sum over the ranks of a tile's gradient: this rank's rows of it."""
        own = gradient
        if self.ranks > 1:
            own = gradient.new_empty(len(gradient) // self.ranks, gradient.shape[1])
            reduce_scatter(own, gradient, group=self.group)
        if self.replicas is not None:
            dist.all_reduce(own, group=self.replicas)
        return own

    def by_rank(self, y: Tensor) -> Tensor:
        """(…, rows) as (…, ranks, chunk), zero where the last ranks have less."""
        missing = self.ranks * self.chunk - self.rows
        return (F.pad(y, (0, missing)) if missing else y).unflatten(-1, (self.ranks, self.chunk))


class _TiledProduct(torch.autograd.Function):
    """x @ Wᵀ of a sharded W, tile by tile; keeps x and this rank's shard for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, tiles: _Tiles) -> Tensor:  # type: ignore[override]
        y = x.new_empty(*x.shape[:-1], tiles.ranks, tiles.chunk, dtype=tiles.dtype)
        for rows in tiles.slices():
            tile = tiles.gather(shard, rows, x.device)
            y[..., rows] = F.linear(x.to(tiles.dtype), tile).unflatten(-1, (tiles.ranks, -1))
            del tile  # before the next is gathered
        ctx.save_for_backward(x, shard)
        ctx.tiles = tiles
        return y.flatten(-2)[..., : tiles.rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        (x, shard), tiles = ctx.saved_tensors, ctx.tiles
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dy = tiles.by_rank(dy)
        inputs = x.to(tiles.dtype).flatten(0, -2)  # (tokens, in)
        dx = torch.zeros_like(inputs) if needs_dx else None
        dw = torch.zeros_like(shard) if needs_dw else None
        for rows in tiles.slices():
            part = dy[..., rows].flatten(-2).flatten(0, -2)  # (tokens, ranks · rows)
            if dx is not None:
                dx.addmm_(part, tiles.gather(shard, rows, x.device))
            if dw is not None:
                own = dw[rows]
                own.copy_(tiles.reduce((part.T @ inputs).to(shard.dtype))[: len(own)])
        return None if dx is None else dx.view_as(x).to(x.dtype), dw, None


def check_weight_tiles(model: nn.Module, plan: Plan, layout: Layout, techniques: Techniques) -> None:
    """Whether weights can be gathered in tiles; needs no process group.

    Raises:
        ConfigError, LayoutError: the first rule that is broken; with what to change.
    """
    tiles, name = techniques.tile_weights, config_field("tile_weights")
    given = f"{name} {tiles}"
    if tiles < 1:
        raise ConfigError(f"{given}: it must be at least 1")
    if tiles == 1:
        return
    if not plan.weight_tiled:
        raise ConfigError(f"{given}: the plan of this model names no matrices to gather in tiles; use 1")
    if plan.experts and any(find(model, pattern) for pattern in plan.experts):
        raise ConfigError(f"{given}: the large matrices of this model are experts, which ep shards; use 1")
    if techniques.data_parallel in UNSHARDED:
        raise ConfigError(
            f"{given} with {techniques.data_parallel}: every rank has all parameters, and gathers none; use fsdp, hsdp"
        )
    if layout.dp_shard * layout.cp == 1 and not techniques.offload:
        raise ConfigError(
            f"{given}: no ranks shard the parameters of the layout {layout}, so that none are gathered; "
            f"use dp_shard 2 or more, {config_field('offload')}, or 1"
        )
    if techniques.compile:
        raise ConfigError(f"{given} with {config_field('compile')}: gathering is no part of a graph; leave one out")
    if techniques.checkpointing == "selective":
        raise ConfigError(
            f"{given} with activation checkpointing 'selective', which keeps each tile's product beside the whole: "
            f"use 'full' or 'none'"
        )


def in_tiles(model: nn.Module, plan: Plan, techniques: Techniques) -> list[nn.Linear]:
    """The matrices that are gathered in tiles; none where there is one tile."""
    names = plan.weight_tiled if techniques.tile_weights > 1 else ()
    return [module for pattern in names for module in find(model, pattern) if isinstance(module, nn.Linear)]


def apply_weight_tiles(model: nn.Module, plan: Plan, techniques: Techniques, dtype: torch.dtype) -> None:
    """Replace the matrices of `in_tiles` by `TiledLinear`, in place; names stay. dtype: to compute in."""
    paths = {id(module): path for path, module in model.named_modules()}
    for linear in in_tiles(model, plan, techniques):
        parent, _, name = paths[id(linear)].rpartition(".")
        setattr(model.get_submodule(parent), name, TiledLinear(linear, techniques.tile_weights, dtype))


def tiled_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that are gathered in tiles."""
    return [module.weight for module in _tiled_linears(model)]


def shard_tiled_weights(model: nn.Module, mesh: DeviceMesh, offload: OffloadPolicy) -> set[nn.Parameter]:
    """Shard `tiled_weights` as FSDP does, in place, and return them: its units then leave them out.

    Args:
        mesh: that FSDP gets.
    """
    for module in _tiled_linears(model):
        holder = nn.Module()  # FSDP shards it, and is then let go of
        holder.weight = module.weight
        fully_shard(holder, mesh=mesh, offload_policy=offload)
        module.weight, module.mesh = holder.get_parameter("weight"), mesh
    return set(tiled_weights(model))


def _tiled_linears(model: nn.Module) -> list[TiledLinear]:
    return [module for module in model.modules() if isinstance(module, TiledLinear)]
