"""A timeline of ranks: a row a rank, a box an action; as a picture, or as characters for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}
COLORS = {"F": "#7db3e8", "B": "#2563b8", "I": "#6b4fa3", "W": "#2f855a"}
LIGHT = ("F",)  # kinds whose boxes take dark text
IDLE = "#eef1f4"
LINES = {"F": "─", "B": "━", "I": "═", "W": "┄"}


class Span(NamedTuple):
    """kind: a key of `NAMES`. label: short. turn: which of its rank's stages, from 0. begin, end: seconds."""

    kind: str
    label: str
    turn: int
    begin: float
    end: float


class Panel(NamedTuple):
    """A chart: `rows` by rank."""

    title: str
    rows: Sequence[Sequence[Span]]


def timeline_text(panel: Panel, width: int = 100) -> str:
    """A line a rank: ``F3──`` is forward of micro-batch 3, small letters are later stages, ``·`` is idle."""
    end = max(span.end for row in panel.rows for span in row)
    start = min(span.begin for row in panel.rows for span in row)
    columns = width - 9
    lines = [panel.title]
    for rank, row in enumerate(panel.rows):
        cells = ["·"] * columns
        for span in row:
            first, last = (round((time - start) / (end - start) * columns) for time in (span.begin, span.end))
            kind = span.kind if span.turn == 0 else span.kind.lower()
            text = f"{kind}{span.label}"
            room = last - first
            drawn = text if len(text) <= room else kind
            cells[first:last] = list(f"{drawn}{LINES[span.kind] * room}"[:room])
        lines.append(f"rank {rank:<3} " + "".join(cells))
    ruler = f"{'':9}0{(end - start) * 1e3:>{columns - 4},.1f} ms"
    return "\n".join([*lines, ruler])


def legend_text(panel: Panel) -> str:
    spans = [span for row in panel.rows for span in row]
    kinds = [f"{kind} {name}" for kind, name in NAMES.items() if any(span.kind == kind for span in spans)]
    small = ["small letters: a rank's later stages"] if any(span.turn for span in spans) else []
    return ", ".join([*kinds, *small, "· idle"])


def timeline_figure(panels: Sequence[Panel], title: str) -> "Figure":
    """Panels below each other, each with its own time axis."""
    from matplotlib.patches import Patch

    from mmm.history.plots.figures import new_figure

    ranks = len(panels[0].rows)
    panel_height = 0.42 * ranks + 0.85  # inches
    height = 1.05 + panel_height * len(panels)
    figure = new_figure(11.0, height)
    figure.text(0.02, 1 - 0.10 / height, title, fontsize=13, fontweight="bold", va="top")
    spans = [span for panel in panels for row in panel.rows for span in row]
    kinds = [kind for kind in NAMES if any(span.kind == kind for span in spans)]
    patches = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    if any(span.turn for span in spans):
        patches.append(Patch(facecolor=faded(COLORS["F"]), edgecolor="none", label="paler: a rank's later stage"))
    patches.append(Patch(color=IDLE, label="idle"))
    figure.legend(
        handles=patches,
        ncols=len(patches),
        loc="upper left",
        bbox_to_anchor=(0.02, 1 - 0.42 / height),
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.3,
        handlelength=1.2,
    )
    between = 0.85 / (panel_height - 0.85)
    figure.subplots_adjust(left=0.07, right=0.985, top=1 - 1.05 / height, bottom=0.5 / height, hspace=between)
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(len(panels), 1, index + 1), panel)
    return figure


def faded(color: str) -> tuple[float, float, float]:
    """Half way to white."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return (red + 1) / 2, (green + 1) / 2, (blue + 1) / 2


def _draw(axes: "Axes", panel: Panel) -> None:
    from mmm.history.plots.figures import GREY, INK

    start = min(span.begin for row in panel.rows for span in row)
    end = max(span.end for row in panel.rows for span in row)
    points = axes.get_window_extent().width * 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    for rank, row in enumerate(panel.rows):
        axes.broken_barh([(0, (end - start) * 1e3)], (rank - 0.4, 0.8), facecolors=IDLE, zorder=1)
        bars = [((span.begin - start) * 1e3, (span.end - span.begin) * 1e3) for span in row]
        colors = [faded(COLORS[span.kind]) if span.turn else COLORS[span.kind] for span in row]
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colors, edgecolors="white", linewidths=0.5, zorder=2)
        for span, (left, wide) in zip(row, bars, strict=True):
            if wide / ((end - start) * 1e3) * points > 6.5 * len(span.label) + 2:
                dark = span.kind in LIGHT or span.turn
                axes.text(
                    left + wide / 2,
                    rank,
                    span.label,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=INK if dark else "white",
                    zorder=3,
                )
    axes.set_title(panel.title, fontsize=10.5)
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.rows)), [f"rank {rank}" for rank in range(len(panel.rows))])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms", color=GREY)
