"""The picture of a dry run: the memory of its ranks over the last step, by part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmm import units
from mmm.errors import ConfigError
from mmm.history.plots.style import new_figure, save, style, theme
from mmm.palette import MEMORY
from mmm.plan.dry_run import DryRun, RankReport
from mmm.plan.dry_run_report import rank_name
from mmm.plan.tracker import MemoryTimeline
from mmm.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the tracker's parts, from the bottom: what stays is below what comes and goes.
ORDER = {
    "parameters": "parameters",
    "optimizer state": "optimizer",
    "gradients": "gradients",
    "gathered": "gathered",
    "activations": "activations",
    "logits": "logits",
    "communication": "communication",
    "temporary": "other",
}
MOST_POINTS = 1500
ROOM = 1.6  # a budget beyond so many peaks is named, and not drawn


def draw(found: DryRun, budget: int | None, folder: Path, name: str = "light") -> Path:
    """Draw ``memory-step.png`` under `folder`. Returns its path.

    Args:
        budget: bytes of a device. name: of a theme.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with style(name):
            return save(step_figure(found, budget), folder / "memory-step.png")[0]
    except OSError as error:
        raise ConfigError(f"--plots {folder}: it cannot be written: {error.strerror}") from None


def step_figure(found: DryRun, budget: int | None = None) -> Figure:
    """A panel a rank, with one scale."""
    from matplotlib.patches import Patch

    shown = [(report, report.timeline) for report in found.ranks if report.timeline and report.timeline.doing]
    height = 1.1 + 3.0 * len(shown)
    figure = new_figure(10, height)
    figure.subplots_adjust(left=0.085, right=0.98, top=1 - 0.8 / height, bottom=0.75 / height, hspace=0.35)
    first = found.ranks[0]
    title = f"Memory over a step: {found.world_size:,} ranks, layout {first.layout}, {first.precision}"
    figure.text(0.02, 1 - 0.12 / height, title, fontsize=13, fontweight="bold", va="top")
    unit = GIB if found.worst.peak.bytes >= GIB else MIB
    panels = figure.subplots(max(len(shown), 1), 1, squeeze=False)[: len(shown), 0]
    most = max((max(timeline.total) for _, timeline in shown), default=0)
    line = budget if budget is not None and budget <= ROOM * most else None
    for axes, (report, timeline) in zip(panels, shown, strict=True):
        _panel(axes, report, timeline, line, unit)
        axes.set_ylim(0, 1.22 * max(most, line or 0) / unit)
    used = [part for part in ORDER if any(any(timeline.parts[part]) for _, timeline in shown)]
    handles = [Patch(color=MEMORY[ORDER[part]], label=part) for part in used]
    figure.legend(handles=handles, ncols=len(used), loc="lower left", bbox_to_anchor=(0.01, 0.0), columnspacing=1.2)
    return figure


def _panel(axes: Axes, report: RankReport, timeline: MemoryTimeline, budget: int | None, unit: int) -> None:
    kept = _thinned(timeline.total)
    base = np.zeros(len(kept))
    for part, color in ORDER.items():
        height = np.array(timeline.parts[part])[kept] / unit
        axes.fill_between(kept, base, base + height, step="post", color=MEMORY[color], lw=0)
        base = base + height
    peak = int(np.argmax(base))
    if budget is not None:
        axes.axhline(budget / unit, color=theme().ink, lw=1.2, ls="--")
        axes.text(kept[-1], budget / unit, f"budget {units.size(budget, 2)} ", ha="right", va="bottom", fontsize=9)
    axes.plot(kept[peak], base[peak], "v", color=theme().ink, ms=6, clip_on=False)
    right = kept[peak] > 0.5 * kept[-1]
    said = f"most: {units.size(max(timeline.total), 2)}, {timeline.doing[kept[peak]]}"
    look = {"ha": "right" if right else "left", "va": "bottom", "fontsize": 9, "textcoords": "offset points"}
    axes.annotate(said, (kept[peak], base[peak]), (-7 if right else 7, 0), **look)  # type: ignore[arg-type]
    axes.set_xlim(0, max(kept[-1], 1))
    _phases(axes, timeline.doing)
    axes.grid(axis="x", visible=False)
    axes.set_xticks([])
    axes.set_xlabel("allocations and frees, in their order", color=theme().muted, fontsize=9)
    axes.set_ylabel("GiB" if unit == GIB else "MiB")
    axes.set_title(f"{rank_name(report)}, {timeline.phase}", fontsize=10.5)


def _phases(axes: Axes, doing: Sequence[str]) -> None:
    """Where forward, backward and what follows it are; those that are too short have no name."""
    begin, after = 0, len(doing) - doing[::-1].index("backward") if "backward" in doing else 0
    parts = [*doing[:after], *["optimizer"] * (len(doing) - after)] if after else doing
    for name, changes in groupby(parts):
        end = begin + len(list(changes))
        if end - begin > 0.07 * len(doing):
            axes.text((begin + end) / 2, 0.985, name, transform=axes.get_xaxis_transform(), ha="center", va="top")
        if begin:
            axes.axvline(begin, color=theme().muted, lw=0.6, ls=":")
        begin = end


def _thinned(total: Sequence[int]) -> list[int]:
    """The numbers of at most `MOST_POINTS` changes: of neighbours the one after which there is most, and the last."""
    every = -(-len(total) // MOST_POINTS)
    blocks = [range(begin, min(begin + every, len(total))) for begin in range(0, len(total), every)]
    return sorted({*(max(block, key=total.__getitem__) for block in blocks), len(total) - 1})
