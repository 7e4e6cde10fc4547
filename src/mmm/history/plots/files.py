"""The plots of a run, to their files. A plot that fails is a warning, never the end of a run."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.plots.series import config_of, main_loss, metrics, told_apart_by
from mmm.history.plots.terminal import terminal_plot, terminal_summary
from mmm.history.record.folder import PLOT_LIST, PLOTS, write_atomically
from mmm.outside import read_json

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure

    from mmm.history.plots.timeline import Panel

    Draw = Callable[[], Figure | None]

log = logging.getLogger("mmm")


def plot_summary(ds: "xarray.Dataset", outdir: Path | str) -> list[Path]:
    """Draw what a run leaves under ``outdir/plots``: ``mplot/pngs/summary.png``, with loss, accuracy, the step's time
    in its parts, throughput; ``tplot/summary.txt``, its loss and small plots (100 characters wide, UTF-8).

    Nothing is raised: what cannot be drawn or written is logged as a warning (logger ``mmm``). Returns the files that
    were written.
    """
    folder, loss = Path(outdir), main_loss(ds)
    written = [] if loss is None else _attempt("summary", partial(_text, partial(terminal_summary, ds, loss), folder))
    written += _pictures({"summary": _summary(ds, folder)}, folder, (".png",), "light")
    _attempt("the list of plots", partial(_list, folder, written))
    return written


def plot_all(
    ds: "xarray.Dataset", outdir: Path | str, names: Sequence[str] | None = None, theme: str = "light"
) -> list[Path]:
    """Draw metrics of `ds` under ``outdir/plots`` and return the files that were written, as `plot_summary` does.

    ``mplot/pngs/<metric>.png``, ``mplot/svgs/<metric>.svg``, ``tplot/<metric>.txt`` (100 × 24 characters, UTF-8).

    Args:
        names: of the metrics; None for all, and the summary.
        theme: of the pictures, light or dark.
    """
    folder = Path(outdir)
    if not ds.sizes.get("draw"):
        log.warning("no plots in %s: the record has no rows", folder)
        return []
    drawn = [name for name in metrics(ds) if name != told_apart_by(ds)] if names is None else list(names)
    written: list[Path] = []
    for name in drawn:
        written += _attempt(name, partial(_text, partial(terminal_plot, ds, name, 100, 24), folder, name))
    figures: dict[str, Draw] = {name: _metric(ds, name) for name in drawn}
    figures |= {"summary": _summary(ds, folder)} if names is None else {}
    written += _pictures(figures, folder, (".png", ".svg"), theme)
    _attempt("the list of plots", partial(_list, folder, written))
    return written


def _metric(ds: "xarray.Dataset", name: str) -> "Draw":
    def draw() -> "Figure":
        from mmm.history.plots import figures

        return figures.metric_figure(ds, name)

    return draw


def _summary(ds: "xarray.Dataset", folder: Path) -> "Draw":
    def draw() -> "Figure | None":
        from mmm.history.plots import summary

        *_, above, name = ("", *folder.absolute().parts)
        return summary.summary_figure(ds, f"{config_of(ds).get('module') or above} · {name}")

    return draw


def plot_timeline(panels: "Sequence[Panel]", title: str, outdir: Path | str, name: str) -> list[Path]:
    """Draw what ranks do when: ``plots/mplot/pngs/<name>.png``, the svg, ``plots/tplot/<name>.txt``; the files written.

    As with `plot_all`, nothing is raised.
    """
    from mmm.history.plots.timeline import timeline_text

    folder = Path(outdir)

    def draw() -> "Figure":
        from mmm.history.plots.timeline import timeline_figure

        return timeline_figure(panels, title)

    text = partial(_text, lambda: "\n\n".join(map(timeline_text, panels)) + "\n", folder, name)
    written = _attempt(name, text)
    _attempt("the list of plots", partial(_list, folder, written))
    return written + plot_figure(draw, folder, name, (".png", ".svg"))


def plot_figure(draw: "Draw", outdir: Path | str, name: str, suffixes: Sequence[str] = (".png",)) -> list[Path]:
    """Draw a program's own figure to ``plots/mplot/pngs/<name>.png``. As with `plot_all`, nothing is raised."""
    folder = Path(outdir)
    written = _pictures({name: draw}, folder, suffixes, "light")
    _attempt("the list of plots", partial(_list, folder, written))
    return written


def _pictures(figures: "Mapping[str, Draw]", folder: Path, suffixes: Sequence[str], theme: str) -> list[Path]:
    """Draw each figure to a file of its name for each suffix, and return those that were written."""
    written: list[Path] = []
    try:
        from mmm.history.plots.style import style

        with style(theme):
            for name, draw in figures.items():
                written += _attempt(name, partial(_picture, draw, folder, name, suffixes))
    except Exception as error:  # matplotlib itself is missing or broken
        log.warning("no pictures in %s: %s: %s", folder / PLOTS, type(error).__name__, error)
    return written


def _attempt(name: str, draw: Callable[[], list[Path]]) -> list[Path]:
    try:
        return draw()
    except Exception as error:  # anything a plotting library raises: the data is on disk already
        log.warning("plot %s failed: %s: %s", name, type(error).__name__, error)
        return []


def _text(draw: Callable[[], str], folder: Path, name: str = "summary") -> list[Path]:
    path = folder / PLOTS / "tplot" / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(), encoding="utf-8")
    return [path]


def _picture(draw: "Draw", folder: Path, name: str, suffixes: Sequence[str]) -> list[Path]:
    from mmm.history.plots.style import save

    figure = draw()
    if figure is None:
        return []
    return save(figure, *(folder / PLOTS / "mplot" / f"{kind[1:]}s" / f"{name}{kind}" for kind in suffixes))


def _list(folder: Path, written: list[Path]) -> list[Path]:
    """Add to the list of plots drawn here: `prepare` with overwrite removes these and no others."""
    path = folder / PLOT_LIST
    known = {name for name in read_json(path, RecordError, list) if isinstance(name, str)} if path.exists() else set()
    known |= {str(file.relative_to(folder)) for file in written}
    if known:
        write_atomically(path, json.dumps(sorted(known), indent=1).encode())
    return []
