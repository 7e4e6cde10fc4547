"""The plots of a run, to their files. A plot that fails is a warning, never the end of a run."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.history.plots.series import config_of, main_loss
from mmm.history.plots.terminal import terminal_plot
from mmm.history.record.folder import PLOTS

if TYPE_CHECKING:
    import xarray

log = logging.getLogger("mmm")


def plot_summary(ds: "xarray.Dataset", outdir: Path | str, suffixes: Sequence[str] = (".png",)) -> list[Path]:
    """Draw a run under ``outdir/plots``: ``mplot/pngs/summary.png``, with loss, accuracy, the step's time in its parts,
    throughput; ``tplot/summary.txt``, its loss (100 characters wide, UTF-8).

    Nothing is raised: what cannot be drawn or written is logged as a warning (logger ``mmm``). Returns the files that
    were written.

    Args:
        suffixes: of the pictures: .png and .svg.
    """
    folder = Path(outdir) / PLOTS
    written = _try(lambda: _draw_picture(ds, folder, suffixes))
    if main_loss(ds) is not None:
        written += _try(lambda: _draw_text(ds, folder))
    return written


def _try(draw: Callable[[], list[Path]]) -> list[Path]:
    try:
        return draw()
    except Exception as error:  # anything a plotting library raises, or that none is there: the data is on disk already
        log.warning("a plot failed: %s: %s", type(error).__name__, error)
        return []


def _draw_picture(ds: "xarray.Dataset", folder: Path, suffixes: Sequence[str]) -> list[Path]:
    from mmm.history.plots.style import save, style
    from mmm.history.plots.summary import summary_figure

    run = folder.absolute().parent
    with style():
        figure = summary_figure(ds, f"{config_of(ds).get('module') or run.parent.name} · {run.name}")
        if figure is None:
            return []
        return save(figure, *(folder / "mplot" / f"{suffix[1:]}s" / f"summary{suffix}" for suffix in suffixes))


def _draw_text(ds: "xarray.Dataset", folder: Path) -> list[Path]:
    path = folder / "tplot" / "summary.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(terminal_plot(ds, main_loss(ds) or ""), encoding="utf-8")
    return [path]
