"""The pictures of a search: memory by part against the budget, tokens a second against ranks, time against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmm.errors import ConfigError
from mmm.history.plots.figures import BLUE, GREY, INK, ORANGE, new_figure, style
from mmm.plan.candidate import GIB, Candidate, Found
from mmm.plan.memory import PARTS
from mmm.plan.search import Search

COLORS = ("#2563b8", "#7db3e8", "#1f3a5f", "#e0a840", "#c8553d", "#9aa5b1", "#6aa84f")  # of the parts
MOST_BARS = 14
POINTS = 7  # numbers of hosts


def draw(search: Search, found: Found, kinds: Sequence[Candidate], folder: Path) -> list[Path]:
    """Draw them under `folder`, as PNG. Returns the files. Raises ConfigError where they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with style():
            return [
                _memory(search, kinds, folder / "memory.png"),
                _ranks(search, found, folder / "ranks.png"),
                _frontier(search, found, folder / "frontier.png"),
            ]
    except OSError as error:
        raise ConfigError(f"--plots {folder}: it cannot be written: {error.strerror}") from None


def _memory(search: Search, kinds: Sequence[Candidate], path: Path) -> Path:
    shown, budget = list(kinds[:MOST_BARS]), search.machine.budget / GIB
    figure = new_figure(9, 1.6 + 0.42 * len(shown))
    axes = figure.subplots()
    used = {part: color for part, color in zip(PARTS, COLORS, strict=True) if any(c.memory[part] for c in shown)}
    longest = 1.6 * budget  # a bar that is longer is broken off, and says how long it is
    for row, candidate in enumerate(shown):
        left = 0.0
        for part, color in used.items():
            width = min(candidate.memory[part] / GIB, max(longest - left, 0.0))
            axes.barh(row, width, left=left, color=color, label=part if row == 0 else None, height=0.7)
            left += width
        if candidate.bytes / GIB > longest:
            axes.text(longest, row, f" {candidate.bytes / GIB:,.0f} GiB", va="center", fontsize=8, color=INK)
    axes.axvline(budget, color=INK, linewidth=1.2, linestyle="--")
    axes.text(budget, -0.9, f" budget {budget:,.1f} GiB", color=INK, fontsize=9, va="center")
    axes.set_yticks(range(len(shown)), [f"{c.kind}   {c.layout}" for c in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -1.4)
    axes.set_xlim(0, longest * 1.12)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("GiB on the rank that needs most")
    axes.set_title(f"{search.spec.name}: memory by part, the best of each kind")
    below = -0.75 / (1.6 + 0.42 * len(shown))  # of the figure's height: under the label of the axis
    axes.legend(ncols=len(used), loc="upper center", bbox_to_anchor=(0.35, below), columnspacing=1.0)
    figure.savefig(path, bbox_inches="tight")
    return path


def _ranks(search: Search, found: Found, path: Path) -> Path:
    """The batch stays a rank's: of each number of hosts the best layout, and a line through the first without loss."""
    machine, points = search.machine, []
    counts = {max(1, round(machine.hosts / 2**step)) for step in range(POINTS)}
    for hosts in sorted(counts):
        smaller = replace(machine, hosts=hosts)
        batch = max(1, search.global_batch * hosts // machine.hosts)
        other = type(search)(search.spec, smaller, batch, search.dtype, fixed=search.fixed)
        best = (found if hosts == machine.hosts else other.run()).best
        if best:
            points.append((smaller.ranks, best[0]))
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    ranks, rates = [point[0] for point in points], [point[1].tokens_per_second for point in points]
    axes.plot(ranks, [rates[0] * n / ranks[0] for n in ranks], color=GREY, linestyle="--", label="in proportion")
    axes.plot(ranks, rates, color=BLUE, marker="o", label="predicted, the best layout")
    for number, (count, candidate) in enumerate(points):
        below = number % 2
        axes.annotate(
            str(candidate.layout),
            (count, candidate.tokens_per_second),
            textcoords="offset points",
            xytext=(6, -12) if below else (-6, 8),
            ha="left" if below else "right",
            fontsize=8,
            color=INK,
        )
    if len(ranks) > 1:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.margins(x=0.25, y=0.12)
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    low, high = math.floor(math.log2(min(rates))), math.ceil(math.log2(max(rates)))
    ticks = [2.0**n for n in range(low, high + 1)] if len(ranks) > 1 else rates
    axes.set_yticks(ticks, [f"{tick / 1000:,.3g} k" if tick >= 1000 else f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ranks (the batch grows with them)")
    axes.set_ylabel("tokens/s" if search.spec.seq_length else "samples/s")
    axes.set_title(f"{search.spec.name} on {machine.name}: rate against ranks")
    axes.legend(loc="upper left")
    figure.savefig(path, bbox_inches="tight")
    return path


def _frontier(search: Search, found: Found, path: Path) -> Path:
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    memory = [candidate.bytes / GIB for candidate in found.best]
    times = [candidate.cost.seconds for candidate in found.best]
    axes.scatter(memory, times, s=10, color=GREY, alpha=0.5, label="layouts that fit", linewidths=0)
    edge = frontier(found.best)
    axes.plot(
        [c.bytes / GIB for c in edge],
        [c.cost.seconds for c in edge],
        color=ORANGE,
        marker="o",
        drawstyle="steps-post",
        label="frontier: none is faster and smaller",
    )
    top = min(max(times), 2.5 * min(times))
    labelled: list[tuple[float, float]] = []
    for candidate in (edge[-1], edge[0], *edge):
        at = candidate.bytes / GIB, candidate.cost.seconds
        near = any(abs(at[0] - x) < 0.15 * max(memory) and abs(at[1] - y) < 0.1 * top for x, y in labelled)
        if at[1] <= top and not near:
            labelled.append(at)
            axes.annotate(
                str(candidate.layout),
                at,
                textcoords="offset points",
                xytext=(-6, -4),
                ha="right",
                va="top",
                fontsize=8,
                color=INK,
            )
    budget = search.machine.budget / GIB
    axes.axvline(budget, color=INK, linewidth=1.2, linestyle="--", label=f"budget {budget:,.1f} GiB")
    axes.set_ylim(0.88 * min(times), 1.05 * top)
    axes.set_xlim(left=0)
    axes.set_xlabel("GiB on the rank that needs most")
    axes.set_ylabel("seconds a step")
    axes.set_title(f"{search.spec.name} on {search.machine.ranks:,} devices: time against memory")
    axes.legend(loc="upper right")
    figure.savefig(path, bbox_inches="tight")
    return path


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no smaller one is as fast as, to 1 %; the smallest first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.bytes, c.cost.seconds)):
        if not found or candidate.cost.seconds < 0.99 * found[-1].cost.seconds:
            found.append(candidate)
    return found
