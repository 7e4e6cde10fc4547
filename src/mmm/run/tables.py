"""What a run shows people: its model before and after it is sharded, and its ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.layout import Layout
from mmm.nn.draw import canonical_name
from mmm.parallel.local import to_local
from mmm.runtime.log import get_logger
from mmm.runtime.ranks import whoami

RANKS_SHOWN = 32
MESH_RANKS = 64  # that a mesh is drawn to


def print_on_rank0(text: str) -> None:
    """On rank 0, outside any run: what --summary asks for."""
    if whoami().is_main:
        print(text)


def _as_text(table: Table) -> str:
    console = Console(width=120, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _placement(parameter: Tensor) -> str:
    """How a parameter lies on the mesh: ``dim 0 over tp, then dp_shard``."""
    dims: dict[int, list[str]] = {}
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(reversed(names), reversed(parameter.placements), strict=True):
            dim = getattr(placement, "dim", None)
            if dim is not None and parameter.device_mesh[name].size() > 1:
                dims.setdefault(dim, []).append(name)
    return ", ".join(f"dim {d} over {', then '.join(axes)}" for d, axes in dims.items()) or "replicated"


def local_parameters(model: nn.Module) -> int:
    """Elements of the model's parameters, or shards of them, on this rank."""
    return sum(to_local(p).numel() for p in model.parameters())


def sharded_model(model: nn.Module) -> str:
    """A table of the parameters as this rank holds them; layers that are alike share a line. Empty where this rank logs
    nothing."""
    if not get_logger().isEnabledFor(logging.INFO):
        return ""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, parameter in model.named_parameters():
        full, local = ("×".join(map(str, t.shape)) for t in (parameter, to_local(parameter)))
        general = re.sub(r"(?<=\.)\d+(?=\.)", "*", canonical_name(name))
        lines.setdefault((general, full, _placement(parameter), local, str(parameter.dtype)[6:]), []).append(name)
    table = Table(title="parameters, sharded (rank 0's view)", title_justify="left", box=None, pad_edge=False)
    for heading in ("parameter", "times", "full", "sharded", "local", "dtype"):
        table.add_column(heading, justify="right" if heading == "times" else "left")
    for (general, *cells), names in lines.items():
        table.add_row(general if len(names) > 1 else names[0], str(len(names)), *cells)
    local_count, full_count = local_parameters(model), sum(p.numel() for p in model.parameters())
    return f"{_as_text(table)}\nlocal: {local_count:,} of {full_count:,} parameters ({local_count / full_count:.1%})"


def stage_table(names: Sequence[Sequence[str]], shares: Sequence[float]) -> str:
    """A line a stage: its part of the computation, and its modules."""
    return "\n".join(
        f"stage {number}, {part:.0%} of the computation: {' '.join(modules)}"
        for number, (modules, part) in enumerate(zip(names, shares, strict=True))
    )


def rank_table(ranks: Sequence[dict[str, Any]]) -> str:
    """Ranks with host and place on the mesh; above 32 ranks, the first 32."""
    axes = [key for key in ranks[0] if key in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    shown_axes = [axis for axis in axes if any(rank[axis] for rank in ranks)]
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "local", "host", "device", *shown_axes):
        table.add_column(heading, justify="left" if heading in ("host", "device") else "right")
    for rank in ranks[:RANKS_SHOWN]:
        table.add_row(*(str(rank[key]) for key in ("rank", "local_rank", "host", "device", *shown_axes)))
    if len(ranks) > RANKS_SHOWN:
        table.add_row("…", "", f"({len(ranks) - RANKS_SHOWN} more)")
    return _as_text(table)


def mesh_table(layout: Layout) -> str:
    """The ranks as they lie on the mesh, a line along its innermost axis; "" for one axis, or more than 64 ranks::

    ranks on the mesh, along tp
    dp_shard 0   0 1
    dp_shard 1   2 3
    """
    axes = [axis for axis, size in layout.sizes.items() if size > 1]
    if len(axes) < 2 or layout.ranks > MESH_RANKS:
        return ""
    length, width = layout.sizes[axes[-1]], len(str(layout.ranks - 1))
    lines = [f"ranks on the mesh, along {axes[-1]}"]
    for first in range(0, layout.ranks, length):
        place = layout.coordinates(first)
        along = " ".join(f"{rank:>{width}}" for rank in range(first, first + length))
        lines.append("  ".join([*(f"{axis} {place[axis]}" for axis in axes[:-1]), f" {along}"]))
    return "\n".join(lines)
