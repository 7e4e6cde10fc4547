"""MLPs computed in tiles of the sequence: a layer's hidden activations are 1 / tiles as large.

An MLP treats each token by itself, and its hidden activations are the largest of a layer: (batch, seq, hidden), several
of them (SwiGLU: four). Tile by tile, they exist for one tile only. Backward recomputes each tile::

    x     ┌──────┬──────┬──────┐                     (batch, seq, dim)
          └──┬───┴──────┴──────┘
             ▼ one tile at a time
    w1 w3 ┌────────────────────┐
    SiLU  │ (batch, seq / tiles, hidden)             freed after each tile; recomputed in backward
    w2    └──┬─────────────────┘
             ▼
    y     ┌──────┬──────┬──────┐                     (batch, seq, dim)
          └──────┴──────┴──────┘

The tiles share the weights, which FSDP gathers once, for the layer; autograd sums the tiles' gradients, so that FSDP
reduces them once.

Under tp with the sequence sharded, a tile consists of some of *each* rank's local tokens: one tile is gathered over the
sequence at a time, and its output is scattered to the same ranks again. (A tile of the full sequence would leave each
rank with other ranks' tokens.)

Source: Bekman et al., "Arctic long sequence training", 2025 (TiledMLP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from mmm.errors import ConfigError
from mmm.parallel.local import to_local
from mmm.parallel.plan import Plan, find

Forward = Callable[[Tensor], Tensor]


def apply_tiling(model: nn.Module, plan: Plan, tiles: int) -> Plan:
    """Have the modules that the plan names compute in tiles, in place; names stay.

    Args:
        tiles: of the sequence; with fewer tokens, one a token. 1 changes nothing.

    Returns:
        The plan for tensor parallelism: the tiles gather their own input.

    Raises:
        ConfigError: tiles below 1, or a plan that names no module.
    """
    if tiles < 1:
        raise ConfigError(f"tile {tiles}: it must be at least 1")
    if tiles == 1:
        return plan
    if not plan.tiled:
        raise ConfigError(f"tile {tiles}: the plan of this model names no MLP over a sequence; use 1")
    for pattern in plan.tiled:
        for module in find(model, pattern):
            module.forward = tiled(module.forward, tiles)  # type: ignore[method-assign]
    return replace(plan, tensor={name: style for name, style in plan.tensor.items() if name not in plan.tiled})


def check_tiling(tiles: int, checkpointing: str) -> None:
    """Raises ConfigError where checkpointing would keep the activations that tiles are to free."""
    if tiles > 1 and checkpointing == "selective":
        raise ConfigError(
            f"tile {tiles} with activation checkpointing 'selective', which keeps the outputs of the MLPs' products, "
            f"and so what tiles are to free: use 'full' or 'none'"
        )


def tiled(forward: Forward, tiles: int) -> Forward:
    """`forward`, (batch, seq, dim) in and out, in tiles of the sequence that are recomputed in backward."""

    def in_tiles(x: Tensor) -> Tensor:
        one, local = forward, to_local(x)
        if isinstance(x, DTensor):  # sharded over the sequence

            def one(tile: Tensor) -> Tensor:
                sharded = DTensor.from_local(tile, x.device_mesh, x.placements, run_check=False)
                return forward(sharded.redistribute(placements=[Replicate()]))

        parts = local.tensor_split(min(tiles, local.shape[1]), dim=1)
        return torch.cat([checkpoint(one, part, use_reentrant=False) for part in parts], dim=1)

    return in_tiles
