"""Draws the plots of a run into files. A plot that fails is a warning, never the end of a run."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.history.plots.series import config_of, main_loss
from mmm.history.plots.terminal import terminal_plot
from mmm.history.record.folder import PLOTS

if TYPE_CHECKING:
    import xarray

log = logging.getLogger("mmm")


def plot_summary(
    ds: "xarray.Dataset",
    outdir: Path | str,
    suffixes: Sequence[str] = (".png",),
) -> list[Path]:
    """Draw a run into files below ``outdir/plots``.

    ``mplot/pngs/summary.png`` has the loss, the accuracy, the parts of a step's time and the throughput.
    ``tplot/summary.txt`` has the loss, 100 characters wide, in UTF-8. Nothing is raised: what cannot be drawn or
    written is logged as a warning (logger ``mmm``).

    Args:
        ds: the run's dataset.
        outdir: the run's folder.
        suffixes: formats of the pictures: ``.png``, ``.svg``.

    Returns:
        The files that were written.
    """
    folder = Path(outdir) / PLOTS
    written = _try(_draw_picture, ds, folder, suffixes)
    if main_loss(ds) is not None:
        written += _try(_draw_text, ds, folder)
    return written


def _try(draw: Callable[..., list[Path]], *args: Any) -> list[Path]:
    try:
        return draw(*args)
    except Exception as error:
        # A plotting library may raise anything, or may not be installed. The data is on disk already.
        log.warning("a plot failed: %s: %s", type(error).__name__, error)
        return []


def _draw_picture(ds: "xarray.Dataset", folder: Path, suffixes: Sequence[str]) -> list[Path]:
    from mmm.history.plots.style import save, style
    from mmm.history.plots.summary import summary_figure

    outdir = folder.absolute().parent
    # By default, a run's folder is outputs/<module>/<timestamp>.
    module = config_of(ds).get("module") or outdir.parent.name
    with style():
        figure = summary_figure(ds, f"{module} · {outdir.name}")
        if figure is None:
            return []
        # mplot/pngs/summary.png, mplot/svgs/summary.svg
        paths = [folder / "mplot" / f"{suffix[1:]}s" / f"summary{suffix}" for suffix in suffixes]
        return save(figure, *paths)


def _draw_text(ds: "xarray.Dataset", folder: Path) -> list[Path]:
    path = folder / "tplot" / "summary.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(terminal_plot(ds, main_loss(ds) or ""), encoding="utf-8")
    return [path]
