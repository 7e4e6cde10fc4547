"""The pictures of a search: memory by part against the budget, of the best layouts and of DDP, ZeRO and FSDP; tokens a
second against ranks; time against memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmm.errors import ConfigError
from mmm.history.plots.figures import head
from mmm.history.plots.style import new_figure, save, style, theme
from mmm.layout import Layout, Techniques
from mmm.palette import BLUE, GREY, MEMORY, ORANGE
from mmm.plan.candidate import Candidate, Found
from mmm.plan.memory import MOMENTS, PARTS, PlannedStage
from mmm.plan.search import Search
from mmm.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARDING = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "ZeRO-3, FSDP"}
MOST_BARS = 14
POINTS = 7  # numbers of ranks
LONGEST = 1.6  # of a bar, in budgets: one that is longer is broken off, and says how long it is
ROOM = 3.0  # a budget beyond so many of the longest bar is named, and not drawn: the bars would be too short to read


class Bar(NamedTuple):
    """What a rank has at a moment of a step: bytes by part."""

    name: str
    moment: str
    memory: Mapping[str, float]


def draw(search: Search, found: Found, kinds: Sequence[Candidate], folder: Path, name: str = "light") -> list[Path]:
    """Draw them under `folder`, as PNG.

    Args:
        name: of a theme.

    Returns:
        The files. Of a single rank, or where fewer do not hold the model, there is no curve over ranks.

    Raises:
        ConfigError: they cannot be written.
    """
    try:
        with style(name):
            figures = {
                "memory": memory_figure(search, kinds),
                "sharding": sharding_figure(search),
                "ranks": ranks_figure(search, found),
                "frontier": frontier_figure(search, found),
            }
            paths = [save(figure, folder / f"{name}.png")[0] for name, figure in figures.items() if figure is not None]
    except OSError as error:
        raise ConfigError(f"--plots {folder}: it cannot be written: {error.strerror}") from None
    return paths


def memory_figure(search: Search, kinds: Sequence[Candidate]) -> Figure:
    """The best of each kind, at the moment at which it needs most."""
    bars = []
    for candidate in kinds[:MOST_BARS]:
        layout, techniques, count = candidate.layout, candidate.techniques, candidate.microbatches
        stages: tuple[PlannedStage, ...] = search.one_stage
        if layout.pp > 1:
            stages = search.stages(techniques.schedule, layout.pp, techniques.stages_per_rank or 1)
        batch = -(-candidate.local_batch // count)
        needs = [search.memory.moments(stage, layout, techniques, batch, count) for stage in stages]
        bars.append(_peak(f"{candidate.kind}   {layout}", max(needs, key=lambda moments: max(map(_total, moments)))))
    longest = min(max(_total(bar.memory) for bar in bars), LONGEST * search.machine.budget) / GIB
    return _memory(f"{search.spec.name}: memory of a rank, the best layout of each kind", bars, search, longest)


def sharding_figure(search: Search) -> Figure | None:
    """Data parallelism alone, with ever more sharded over all ranks; None for one rank."""
    ranks = search.machine.ranks
    if ranks == 1:
        return None
    layout, batch = Layout(dp_shard=ranks), max(search.global_batch // ranks, 1)
    bars = []
    for technique, name in SHARDING.items():
        techniques = search.chunked(layout, Techniques(data_parallel=technique), batch)
        moments = search.memory.moments(search.one_stage[0], layout, techniques, batch, 1)
        bars.append(_peak(name, moments))
    sample = f" × {search.spec.seq_length:,} tokens" if search.spec.seq_length else f" sample{'s' * (batch > 1)}"
    has = f"{ranks:,} ranks, {batch}{sample} each, no checkpointing"
    title = f"{search.spec.name}: memory of a rank under data parallelism alone ({has})"
    return _memory(title, bars, search, max(_total(bar.memory) for bar in bars) / GIB)


def _peak(name: str, moments: Sequence[Mapping[str, float]]) -> Bar:
    place = max(range(len(moments)), key=lambda place: _total(moments[place]))
    return Bar(name, MOMENTS[place], moments[place])


def _total(memory: Mapping[str, float]) -> float:
    return sum(memory.values())


def _memory(title: str, bars: Sequence[Bar], search: Search, longest: float) -> Figure:
    """Bars of memory by part, beside the budget; right of them the size of each, and the moment that it is of.

    Args:
        longest: GiB at which a bar is broken off.
    """
    from matplotlib.patches import Patch

    budget, height = search.machine.budget / GIB, 1.75 + 0.42 * len(bars)
    names = max(len(bar.name) for bar in bars)
    figure = new_figure(11, height)
    left = 0.03 + 0.0058 * names
    figure.subplots_adjust(left=left, right=0.76, top=1 - 0.5 / height, bottom=0.95 / height)
    axes = figure.subplots()
    for row, bar in enumerate(bars):
        begin = 0.0
        for part in PARTS:
            width = min(bar.memory[part] / GIB, longest - begin)
            axes.barh(row, width, left=begin, color=_color(part), height=0.7)
            begin += width
        size = _total(bar.memory) / GIB
        said = f" {'» ' if size > 1.001 * longest else ''}{size:,.3g} GiB, at {bar.moment}"
        axes.text(1.0, row, said, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    near = budget <= ROOM * longest
    edge = max(longest, budget) if near else longest
    if near:
        axes.axvline(budget, color=theme().ink, linewidth=1.2, linestyle="--")
    said = f" budget {budget:,.1f} GiB{'' if near else ', beyond this axis →'} "
    axes.text(min(budget, edge), -0.85, said, fontsize=9, va="center", ha="right" if budget > 0.7 * longest else "left")
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.5, -1.3)
    axes.set_xlim(0, 1.02 * edge)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("GiB on the rank that needs most, at the moment at which it needs most")
    figure.text(0.012, 1 - 0.12 / height, title, fontsize=12, fontweight="bold", va="top")
    used = [part for part in PARTS if any(bar.memory[part] for bar in bars)]
    handles = [Patch(color=_color(part), label=part) for part in used]
    figure.legend(handles=handles, ncols=len(used), loc="lower left", bbox_to_anchor=(0.01, 0.0), columnspacing=1.2)
    return figure


def _color(part: str) -> str:
    return MEMORY.get(part, MEMORY["other"])


def ranks_figure(search: Search, found: Found) -> Figure | None:
    """The batch stays a rank's: of each number of ranks the best layout, and a line through the first without loss.
    None where no two numbers of ranks, by halves, hold the model."""
    from matplotlib.ticker import EngFormatter

    machine, points = search.machine, list[tuple[int, Candidate]]()
    for step in reversed(range(POINTS)):
        hosts, devices = machine.hosts >> step, machine.ranks_per_host
        if machine.hosts == 1:
            hosts, devices = 1, machine.ranks_per_host >> step
        if hosts * devices == 0:
            continue
        smaller = replace(machine, hosts=hosts, ranks_per_host=devices)
        batch = max(1, search.global_batch * smaller.ranks // machine.ranks)
        other = Search(search.spec, smaller, batch, search.dtype, search.optimizer, search.fixed)
        best = (found if smaller.ranks == machine.ranks else other.run()).best
        if best:
            points.append((smaller.ranks, best[0]))
    if len(points) < 2:
        return None
    axes, figure = _one_plot()
    ranks, rates = [point[0] for point in points], [point[1].tokens_per_second for point in points]
    ideal = [rates[0] * n / ranks[0] for n in ranks]
    axes.plot(ranks, ideal, color=theme().muted, linestyle="--", label="in proportion to the ranks")
    axes.plot(ranks, rates, color=BLUE, marker="o", label="predicted, the best layout")
    for count, candidate in points:
        place = (count, candidate.tokens_per_second)
        axes.annotate(str(candidate.layout), place, (6, -12), textcoords="offset points", fontsize=8, bbox=_paper())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(ranks[0] / 1.25, ranks[-1] * (ranks[-1] / ranks[0]) ** 0.18)  # with room for the last label
    ticks = _doublings(min(rates), max(*rates, *ideal))
    axes.set_ylim(ticks[0] / 1.5, ticks[-1] * 1.2)
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.set_yticks(ticks, [EngFormatter()(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ranks (the batch grows with them)")
    axes.set_ylabel("tokens/s" if search.spec.seq_length else "samples/s")
    head(axes, f"{search.spec.name} on {machine.name or 'this machine'}: rate against ranks")
    return figure


def _doublings(low: float, high: float) -> list[float]:
    """From a round number that is not above `low` to one that is not below `high`, each twice the one before."""
    power = 10.0 ** math.floor(math.log10(low))
    ticks = [power * max(digit for digit in (1, 2, 4, 5, 8) if digit * power <= low * 1.000001)]
    while ticks[-1] < high:
        ticks.append(2 * ticks[-1])
    return ticks


def _paper() -> dict[str, object]:
    """Under a text, so that a line behind it is no part of it."""
    return {"facecolor": theme().paper, "edgecolor": "none", "alpha": 0.8, "pad": 0.8}


def _one_plot() -> tuple[Axes, Figure]:
    figure = new_figure(9, 5)
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.11, top=0.84)
    return figure.subplots(), figure


def frontier_figure(search: Search, found: Found) -> Figure:
    """Each layout that fits, and those that none is faster and smaller than; the slowest may be left out."""
    axes, figure = _one_plot()
    times = [candidate.cost.seconds for candidate in found.best]
    top = min(max(times), 2.5 * min(times))
    shown = [candidate for candidate in found.best if candidate.cost.seconds <= top]
    memory = [candidate.bytes / GIB for candidate in shown]
    label = "layouts that fit"
    if slower := len(found.best) - len(shown):
        label += f" ({slower:,} slower ones not shown)"
    axes.scatter(memory, [c.cost.seconds for c in shown], s=12, color=GREY, alpha=0.6, label=label, linewidths=0)
    edge = [c for c in frontier(found.best) if c.cost.seconds <= top]
    axes.plot(
        [c.bytes / GIB for c in edge],
        [c.cost.seconds for c in edge],
        color=ORANGE,
        marker="o",
        drawstyle="steps-post",
        label="frontier: none is faster and smaller",
    )
    budget, most = search.machine.budget / GIB, max(memory)
    near = budget <= ROOM * most
    dashes = {"color": theme().ink, "linewidth": 1.2, "linestyle": "--"}
    if near:
        axes.axvline(budget, label=f"budget {budget:,.1f} GiB", **dashes)  # type: ignore[arg-type]
    else:
        axes.plot([], [], label=f"budget {budget:,.1f} GiB, beyond this axis", **dashes)  # type: ignore[arg-type]
    edge_of_axis = 1.06 * (budget if near else most)
    axes.set_xlim(0, edge_of_axis)
    axes.set_ylim(min(times) - 0.12 * (top - min(times) or top), top + 0.06 * (top - min(times) or top))
    _label(axes, edge, edge_of_axis, top - min(times) or top)
    axes.set_xlabel("GiB on the rank that needs most")
    axes.set_ylabel("seconds a step")
    head(axes, f"{search.spec.name} on {search.machine.ranks:,} devices: time against memory")
    return figure


def _label(axes: Axes, edge: Sequence[Candidate], width: float, height: float) -> None:
    """The layouts of the frontier that have room for their names: the ends first."""
    labelled: list[tuple[float, float]] = []
    for candidate in (edge[-1], edge[0], *edge):
        place = candidate.bytes / GIB, candidate.cost.seconds
        near = any(abs(place[0] - x) < 0.25 * width and abs(place[1] - y) < 0.07 * height for x, y in labelled)
        if not near:
            labelled.append(place)
            left = place[0] < 0.2 * width  # else there is nothing left of it and below
            # left of a point, on its level: below it is the next one of the frontier; only below the last there is none
            down = left or candidate is edge[-1]
            look = {
                "ha": "left" if left else "right",
                "va": "top" if down else "bottom",
                "fontsize": 8,
                "bbox": _paper(),
            }
            offset = (6 if left else -6, -4 if down else -1)
            axes.annotate(str(candidate.layout), place, offset, textcoords="offset points", **look)  # type: ignore[arg-type]


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no smaller one is as fast as, to 1 %; the smallest first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.bytes, c.cost.seconds)):
        if not found or candidate.cost.seconds < 0.99 * found[-1].cost.seconds:
            found.append(candidate)
    return found
