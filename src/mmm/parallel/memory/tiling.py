"""MLPs worked out in tiles of the sequence: a layer's hidden activations are 1 / tiles as large.

An MLP works token by token, and its hidden activations are the largest of a layer: (batch, seq, hidden), several of
them (SwiGLU: four). Tile by tile, they exist for one tile only. Backward works each tile out once more::

    x     ┌──────┬──────┬──────┐                     (batch, seq, dim)
          └──┬───┴──────┴──────┘
             ▼ one tile at a time
    w1 w3 ┌────────────────────┐
    SiLU  │ (batch, seq / tiles, hidden)             gone when the tile is done; in backward worked out again
    w2    └──┬─────────────────┘
             ▼
    y     ┌──────┬──────┬──────┐                     (batch, seq, dim)
          └──────┴──────┴──────┘

The tiles share the weights, which FSDP gathers once, for the layer; autograd sums the tiles' gradients before they are
anyone's: they are reduced once.

Under tp with the sequence cut, a tile is a stretch of *each* rank's own tokens: only one tile is gathered over the
sequence at a time, and what the tile leaves scattered is again each rank's own tokens. (A stretch of the whole sequence
would leave each rank with pieces of other ranks' tokens.)

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
from mmm.parallel.plan import Plan, find

Forward = Callable[[Tensor], Tensor]


def apply_tiles(model: nn.Module, plan: Plan, tiles: int) -> Plan:
    """Have the modules that the plan names work in tiles, in place; names stay.

    Args:
        tiles: of the sequence; where there are fewer tokens, as many as tokens. 1 leaves everything as it is.

    Returns:
        The plan for tensor parallel: the tiles gather their own input.

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


def check_tiles(tiles: int, checkpointing: str) -> None:
    """Raises ConfigError where checkpointing would keep what the tiles are there to lose."""
    if tiles > 1 and checkpointing == "selective":
        raise ConfigError(
            f"tile {tiles} with activation checkpointing 'selective', which keeps what the MLPs' "
            f"products give, and so what tiles are there to lose: use 'full' or 'none'"
        )


def tiled(forward: Forward, tiles: int) -> Forward:
    """`forward`, (batch, seq, dim) in and out, in tiles of the sequence that are worked out again in backward."""

    def in_tiles(x: Tensor) -> Tensor:
        one, mine = forward, x
        if isinstance(x, DTensor):  # cut over the sequence: this rank's tokens
            mesh, placements, mine = x.device_mesh, x.placements, x.to_local()

            def one(tile: Tensor) -> Tensor:
                cut = DTensor.from_local(tile, mesh, placements, run_check=False)
                return forward(cut.redistribute(placements=[Replicate()]))

        parts = mine.tensor_split(min(tiles, mine.shape[1]), dim=1)
        return torch.cat([checkpoint(one, part, use_reentrant=False) for part in parts], dim=1)

    return in_tiles
