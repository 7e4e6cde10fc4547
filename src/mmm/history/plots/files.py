"""Every plot of a run, to its files. A plot that fails is a warning, never the end of a run."""

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.plots.series import metrics
from mmm.history.plots.terminal import terminal_plot
from mmm.history.record.folder import PLOT_LIST, PLOTS, write_atomically
from mmm.outside import read_json

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure

    from mmm.history.plots.timeline import Panel

log = logging.getLogger("mmm")


def plot_all(ds: "xarray.Dataset", outdir: Path | str) -> list[Path]:
    """Draw each metric of `ds` under ``outdir/plots`` and return the files that were written.

    ``mplot/pngs/<metric>.png``, ``mplot/svgs/<metric>.svg``, ``tplot/<metric>.txt`` (100 × 24 characters, UTF-8), and
    ``mplot/pngs/summary.png`` with its svg: loss, the step's time in its parts, throughput. Nothing is raised: what
    cannot be drawn or written is logged as a warning (logger ``mmm``) and left out of the list.
    """
    folder = Path(outdir)
    written: list[Path] = []
    names = metrics(ds)
    if not ds.sizes.get("draw"):
        log.warning("no plots in %s: the record has no rows", folder)
        return []
    for name in names:
        written += _attempt(name, partial(_text, partial(terminal_plot, ds, name, 100, 24), folder, name))
    try:
        from mmm.history.plots import figures

        with figures.style():
            for name in names:
                written += _attempt(name, partial(_picture, partial(figures.metric_figure, ds, name), folder, name))
            title = " · ".join(Path(outdir).absolute().parts[-2:])
            draw = partial(figures.summary_figure, ds, title)
            written += _attempt("summary", partial(_picture, draw, folder, "summary"))
    except Exception as error:  # matplotlib itself is missing or broken
        log.warning("no pictures in %s: %s: %s", folder / PLOTS, type(error).__name__, error)
    _attempt("the list of plots", partial(_list, folder, written))
    return written


def plot_timeline(panels: "Sequence[Panel]", title: str, outdir: Path | str, name: str) -> list[Path]:
    """Draw what ranks do when: ``plots/mplot/pngs/<name>.png``, the svg, ``plots/tplot/<name>.txt``; the files written.

    As with `plot_all`, nothing is raised.
    """
    from mmm.history.plots.timeline import timeline_text

    folder = Path(outdir)

    def picture() -> list[Path]:
        from mmm.history.plots import figures
        from mmm.history.plots.timeline import timeline_figure

        with figures.style():
            return _picture(lambda: timeline_figure(panels, title), folder, name)

    text = partial(_text, lambda: "\n\n".join(map(timeline_text, panels)) + "\n", folder, name)
    written = _attempt(name, text) + _attempt(name, picture)
    _attempt("the list of plots", partial(_list, folder, written))
    return written


def _attempt(name: str, draw: Callable[[], list[Path]]) -> list[Path]:
    try:
        return draw()
    except Exception as error:  # anything a plotting library raises: the data is on disk already
        log.warning("plot %s failed: %s: %s", name, type(error).__name__, error)
        return []


def _text(draw: Callable[[], str], folder: Path, name: str) -> list[Path]:
    path = _parent(folder / PLOTS / "tplot" / f"{name}.txt")
    path.write_text(draw(), encoding="utf-8")
    return [path]


def _picture(draw: "Callable[[], Figure | None]", folder: Path, name: str) -> list[Path]:
    figure = draw()
    if figure is None:
        return []
    png = _parent(folder / PLOTS / "mplot" / "pngs" / f"{name}.png")
    svg = _parent(folder / PLOTS / "mplot" / "svgs" / f"{name}.svg")
    figure.savefig(png, pil_kwargs={"compress_level": 3})
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _list(folder: Path, written: list[Path]) -> list[Path]:
    """Add to the list of plots drawn here: `prepare` with overwrite removes these and no others."""
    path = folder / PLOT_LIST
    known = {name for name in read_json(path, RecordError, list) if isinstance(name, str)} if path.exists() else set()
    known |= {str(file.relative_to(folder)) for file in written}
    if known:
        write_atomically(path, json.dumps(sorted(known), indent=1).encode())
    return []


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
