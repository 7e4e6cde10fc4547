"""What each rank has before and after a collective, as boxes: a colour for the rank that a number is from, and of a sum
the colours of all ranks. In a terminal, in a file without colours, as a picture."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.history.plots.save import plot_figure
from mmm.history.plots.style import new_figure, text_on, theme
from mmm.palette import LIGHT, SERIES, YELLOW
from mmm.runtime.log import log_through

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.text import Text

ByRank = Sequence[tuple[list[int], list[int]]]  # what each has before, and after, in numbers; [] for nothing
COLORS = (*SERIES, YELLOW)  # of as many ranks
COLUMNS = 2  # of a picture


def drawn(name: str, by_rank: ByRank) -> str:
    """A line a rank: what it has before and after."""
    texts = [[" ".join(f"{n:2d}" for n in side) or "-" for side in sides] for sides in by_rank]
    width = max(6, *(len(before) for before, _ in texts))
    lines = [f"  rank {rank:<7} {before:<{width}}  →  {after}" for rank, (before, after) in enumerate(texts)]
    return "\n".join([f"{name.replace('_', '-'):14} {'before':<{width}}     after", *lines])


def _origins(name: str, side: int, number: int, ranks: int) -> range:
    """The ranks that a number is from: its tens say which, and what is reduced is from all."""
    is_sum = side == 1 and "reduce" in name
    return range(ranks) if is_sum else range(number // 10, number // 10 + 1)


def show(log: logging.Logger, name: str, by_rank: ByRank) -> None:
    """Log what the ranks have. A terminal that has colours gets boxes in place of the table."""
    from rich.console import Console

    console = Console(highlight=False)
    if len(by_rank) > len(COLORS) or not console.is_terminal or console.color_system is None:
        log.info("%s", drawn(name, by_rank), stacklevel=2)
        return
    with log_through(lambda _: None):  # the file gets the table
        log.info("%s", drawn(name, by_rank), stacklevel=2)
    console.print(boxes(name, by_rank))


def boxes(name: str, by_rank: ByRank) -> Text:
    """`drawn`, with colours."""
    from rich.text import Text

    ranks = len(by_rank)
    width = max(4, ranks)  # of a box
    most = max(len(before) for before, _ in by_rank) * (width + 1)
    text = Text(f"{name.replace('_', '-'):15}{'before':<{most + 4}}after\n", style="bold")
    for rank, sides in enumerate(by_rank):
        text.append(f"  rank {rank:<8}", style="not bold")
        for side, numbers in enumerate(sides):
            for number in numbers:
                _box(text, f"{number:^{width}}", _origins(name, side, number, ranks))
            if side == 0:
                text.append(" " * (most - len(numbers) * (width + 1)) + " →  ", style="not bold")
        text.append("\n")
    return text


def _box(text: Text, label: str, origins: range) -> None:
    for place in range(len(origins)):
        color = COLORS[origins[place]]
        begin, end = (edge * len(label) // len(origins) for edge in (place, place + 1))
        text.append(label[begin:end], style=f"bold {text_on(color)} on {color}")
    text.append(" ")


def draw(everything: Mapping[str, ByRank], outdir: Path) -> list[Path]:
    """``plots/mplot/pngs/collectives.png``; nothing of more ranks than there are colours. Returns the files."""
    if len(next(iter(everything.values()))) > len(COLORS):
        return []
    return plot_figure(lambda: figure_of(everything), outdir, "collectives")


def figure_of(everything: Mapping[str, ByRank]) -> Figure:
    """A block a collective: a row a rank, on the left before, on the right after."""
    ranks = len(next(iter(everything.values())))
    rows = -(-len(everything) // COLUMNS)
    width, height = COLUMNS * (2 * ranks + 5.0), rows * (ranks + 1.9)  # in boxes
    scale = 0.36  # inches of a box
    figure = new_figure(width * scale, height * scale + 0.9)
    title = "What each rank has before and after a collective"
    figure.text(0.02, 1 - 0.1 / figure.get_figheight(), title, fontsize=13, fontweight="bold", va="top")
    about = "A colour is the rank that a number is from; a box of all colours is the sum over the ranks."
    figure.text(0.02, 1 - 0.42 / figure.get_figheight(), about, fontsize=9, va="top", color=theme().muted)
    axes = figure.add_axes((0, 0, 1, height * scale / figure.get_figheight()))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for place, (name, by_rank) in enumerate(everything.items()):
        _block(axes, name, by_rank, place % COLUMNS * (2 * ranks + 5.0) + 0.6, place // COLUMNS * (ranks + 1.9) + 0.5)
    return figure


def _block(axes: Axes, name: str, by_rank: ByRank, left: float, top: float) -> None:
    ranks = len(by_rank)
    starts = (left + 2.0, left + ranks + 3.4)  # of before, of after
    axes.text(left, top, name.replace("_", "-"), fontsize=10.5, fontweight="bold", va="center")
    for rank, sides in enumerate(by_rank):
        y = top + 0.6 + rank
        axes.text(left, y + 0.43, f"rank {rank}", fontsize=8.5, va="center")
        axes.text(left + ranks + 2.6, y + 0.43, "→", fontsize=11, va="center", ha="center")
        for side, numbers in enumerate(sides):
            for place, number in enumerate(numbers):
                _draw_box(axes, number, _origins(name, side, number, ranks), starts[side] + place, y)
            if not numbers:
                axes.text(starts[side] + 0.1, y + 0.43, "–", fontsize=9, va="center")


def _draw_box(axes: Axes, number: int, origins: range, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    wide = 0.92 / len(origins)
    for place, origin in enumerate(origins):
        axes.add_patch(Rectangle((x + place * wide, y), wide, 0.86, color=COLORS[origin], lw=0))
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5, "fontweight": "bold"}
    if len(origins) > 1:  # on several colours
        look |= {
            "color": LIGHT.ink,
            "bbox": {"fc": LIGHT.paper, "ec": "none", "boxstyle": "round,pad=0.15", "alpha": 0.8},
        }
    else:
        look |= {"color": text_on(COLORS[origins[0]])}
    axes.text(x + 0.46, y + 0.43, str(number), **look)
