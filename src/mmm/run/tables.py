"""Tables that a run shows people: its model before and after it is sharded, and its ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.layout import AXES, Layout
from mmm.nn.init import canonical_name
from mmm.parallel.local import to_local
from mmm.runtime.log import get_logger
from mmm.runtime.ranks import whoami

# Number of ranks that the table of ranks lists.
RANKS_SHOWN = 32
# Number of ranks up to which the mesh is drawn.
MESH_RANKS = 64


def print_on_rank0(text: str) -> None:
    """Print on rank 0, outside any run: what --summary asks for."""
    if whoami().is_main:
        print(text)


def _as_text(table: Table) -> str:
    console = Console(width=120, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _placement(parameter: Tensor) -> str:
    """How a parameter lies on the mesh: ``dim 0 over tp, then dp_shard``."""
    # The axes that each dim is sharded over.
    axes_of: dict[int, list[str]] = {}
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = mesh.mesh_dim_names or ()
        # Backwards: the innermost axis has sharded first.
        for axis, placement in zip(axes[::-1], parameter.placements[::-1], strict=True):
            # Only shards have a dim.
            dim = getattr(placement, "dim", None)
            if dim is not None and mesh[axis].size() > 1:
                axes_of.setdefault(dim, []).append(axis)
    if not axes_of:
        return "replicated"
    texts = []
    for dim, dim_axes in axes_of.items():
        texts.append(f"dim {dim} over {', then '.join(dim_axes)}")
    return ", ".join(texts)


def local_parameters(model: nn.Module) -> int:
    """Number of elements of the model's parameters, or of their shards, on this rank."""
    return sum(to_local(parameter).numel() for parameter in model.parameters())


def sharded_model(model: nn.Module) -> str:
    """A table of the parameters as this rank holds them; the parameters of like layers share a line.

    Returns:
        "" if this rank logs nothing.
    """
    if not get_logger().isEnabledFor(logging.INFO):
        return ""
    # Names of the parameters that have the same cells.
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, parameter in model.named_parameters():
        # Such as "layers.*.attention.wq.weight", for all layers.
        general = re.sub(r"(?<=\.)\d+(?=\.)", "*", canonical_name(name))
        full = "×".join(map(str, parameter.shape))
        local = "×".join(map(str, to_local(parameter).shape))
        dtype = str(parameter.dtype).removeprefix("torch.")
        cells = (general, full, _placement(parameter), local, dtype)
        lines.setdefault(cells, []).append(name)
    table = Table(title="parameters, sharded (rank 0's view)", title_justify="left", box=None, pad_edge=False)
    for heading in ("parameter", "times", "full", "sharded", "local", "dtype"):
        table.add_column(heading, justify="right" if heading == "times" else "left")
    for (general, *others), names in lines.items():
        shown_name = general if len(names) > 1 else names[0]
        table.add_row(shown_name, str(len(names)), *others)
    local_count = local_parameters(model)
    full_count = sum(parameter.numel() for parameter in model.parameters())
    share = local_count / full_count
    return f"{_as_text(table)}\nlocal: {local_count:,} of {full_count:,} parameters ({share:.1%})"


def stage_table(names: Sequence[Sequence[str]], shares: Sequence[float]) -> str:
    """A line for each stage: its share of the computation, and its modules."""
    lines = []
    for stage_index, (modules, share) in enumerate(zip(names, shares, strict=True)):
        text = " ".join(modules)
        lines.append(f"stage {stage_index}, {share:.0%} of the computation: {text}")
    return "\n".join(lines)


def rank_table(ranks: Sequence[dict[str, Any]]) -> str:
    """Ranks with host and coordinates on the mesh; only the first 32 of more."""
    # An axis of one rank is not worth a column.
    shown_axes = [axis for axis in AXES if any(rank.get(axis) for rank in ranks)]
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "local", "host", "device", *shown_axes):
        is_text = heading in ("host", "device")
        table.add_column(heading, justify="left" if is_text else "right")
    keys = ("rank", "local_rank", "host", "device", *shown_axes)
    for rank in ranks[:RANKS_SHOWN]:
        cells = [str(rank[key]) for key in keys]
        table.add_row(*cells)
    n_others = len(ranks) - RANKS_SHOWN
    if n_others > 0:
        table.add_row("…", "", f"({n_others} more)")
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
    *outer, innermost = axes
    length = layout.sizes[innermost]
    digits = len(str(layout.ranks - 1))
    lines = [f"ranks on the mesh, along {innermost}"]
    for first in range(0, layout.ranks, length):
        place = layout.coordinates(first)
        columns = [f"{axis} {place[axis]}" for axis in outer]
        ranks = range(first, first + length)
        along = " ".join(f"{rank:>{digits}}" for rank in ranks)
        lines.append("  ".join([*columns, f" {along}"]))
    return "\n".join(lines)
