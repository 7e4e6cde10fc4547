"""A timeline of ranks: a row a rank, a box an action; as a picture, or as characters for a terminal."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmm.history.plots.save import list_files, plot_figure, save_text
from mmm.palette import PIPELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}
LINES = {"F": "─", "B": "━", "I": "═", "W": "┄"}


class Span(NamedTuple):
    """kind: a key of `NAMES`. label: short. turn: which of its rank's stages, from 0. begin, end: seconds."""

    kind: str
    label: str
    turn: int
    begin: float
    end: float


class Panel(NamedTuple):
    """A chart.

    Attributes:
        rows: a rank's spans each. ranks: their numbers; none for those from 0 on. until: seconds from the first begin
            that the axis shows at least, so that two panels have one scale.
    """

    title: str
    rows: Sequence[Sequence[Span]]
    ranks: Sequence[int] = ()
    until: float = 0.0

    @property
    def names(self) -> list[str]:
        return [f"rank {rank}" for rank in self.ranks or range(len(self.rows))]

    @property
    def window(self) -> tuple[float, float]:
        """First and last second that the axis shows."""
        spans = [span for row in self.rows for span in row]
        start = min(span.begin for span in spans)
        return start, max(start + self.until, *(span.end for span in spans))


def plot_timeline(panels: Sequence[Panel], title: str, outdir: Path | str, name: str) -> list[Path]:
    """Draw what ranks do when: ``plots/mplot/pngs/<name>.png``, the svg, ``plots/tplot/<name>.txt``; the files written.

    Nothing is raised: what cannot be drawn or written is a warning.
    """
    folder = Path(outdir)
    written = save_text(lambda: "\n\n".join(map(timeline_text, panels)) + "\n", folder, name)
    list_files(folder, written)
    return written + plot_figure(lambda: timeline_figure(panels, title), folder, name, (".png", ".svg"))


def timeline_text(panel: Panel, width: int = 100) -> str:
    """A line a rank: ``F3──`` is forward of micro-batch 3, small letters are later stages, ``·`` is idle."""
    start, end = panel.window
    columns = width - 9
    lines = [panel.title]
    last_end = max(span.end for row in panel.rows for span in row)
    for name, row in zip(panel.names, panel.rows, strict=True):
        cells = ["·"] * round((last_end - start) / (end - start) * columns)
        for span in row:
            first, last = (round((time - start) / (end - start) * columns) for time in (span.begin, span.end))
            kind = span.kind if span.turn == 0 else span.kind.lower()
            text = f"{kind}{span.label}"
            room = last - first
            drawn = text if len(text) <= room else kind
            cells[first:last] = list(f"{drawn}{LINES[span.kind] * room}"[:room])
        lines.append(f"{name:<8} " + "".join(cells))
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

    from mmm.history.plots.style import new_figure, theme

    ranks = len(panels[0].rows)
    panel_height = 0.42 * ranks + 0.85  # inches
    height = 1.05 + panel_height * len(panels)
    figure = new_figure(11.0, height)
    figure.text(0.02, 1 - 0.10 / height, title, fontsize=13, fontweight="bold", va="top")
    spans = [span for panel in panels for row in panel.rows for span in row]
    kinds = [kind for kind in NAMES if any(span.kind == kind for span in spans)]
    patches = [Patch(color=PIPELINE[kind], label=NAMES[kind]) for kind in kinds]
    if any(span.turn for span in spans):
        patches.append(Patch(facecolor=faded(PIPELINE["F"]), edgecolor="none", label="paler: a rank's later stage"))
    patches.append(Patch(color=theme().idle, label="idle"))
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
        _draw(axes := figure.add_subplot(len(panels), 1, index + 1), panel)
        other = not math.isclose(_length(panel), _length(panels[0]), rel_tol=1e-3)
        axes.set_xlabel("ms: another scale than above" if other else "ms", color=theme().muted)
    return figure


def _length(panel: Panel) -> float:
    """Seconds that the axis shows."""
    start, end = panel.window
    return end - start


def faded(color: str) -> tuple[float, float, float]:
    """Half way to the paper."""
    from matplotlib.colors import to_rgb

    from mmm.history.plots.style import theme

    red, green, blue = ((one + paper) / 2 for one, paper in zip(to_rgb(color), to_rgb(theme().paper), strict=True))
    return red, green, blue


def _draw(axes: "Axes", panel: Panel) -> None:
    from mmm.history.plots.style import text_on, theme

    start, end = panel.window
    last_end = max(span.end for row in panel.rows for span in row)
    points = axes.get_window_extent().width * 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    for rank, row in enumerate(panel.rows):
        axes.broken_barh([(0, (last_end - start) * 1e3)], (rank - 0.4, 0.8), facecolors=theme().idle, zorder=1)
        bars = [((span.begin - start) * 1e3, (span.end - span.begin) * 1e3) for span in row]
        colors = [faded(PIPELINE[span.kind]) if span.turn else PIPELINE[span.kind] for span in row]
        look = {"facecolors": colors, "edgecolors": theme().paper, "linewidths": 0.5}
        axes.broken_barh(bars, (rank - 0.4, 0.8), zorder=2, **look)  # type: ignore[arg-type]
        for span, (left, wide), color in zip(row, bars, colors, strict=True):
            if wide / ((end - start) * 1e3) * points > 6.5 * len(span.label) + 2:
                place = (left + wide / 2, rank)
                look = {"ha": "center", "va": "center", "fontsize": 8, "color": text_on(color), "zorder": 3}
                axes.text(*place, span.label, **look)  # type: ignore[arg-type]
    axes.set_title(panel.title, fontsize=10.5)
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.rows)), panel.names)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,g}")
