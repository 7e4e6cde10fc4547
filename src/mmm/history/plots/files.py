"""The plots of a run, to their files. A plot that fails is a warning, never the end of a run."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.history.plots.save import save_pictures, save_text
from mmm.history.plots.series import config_of, main_loss, metrics
from mmm.history.plots.terminal import terminal_plot, terminal_summary

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure

    from mmm.history.plots.save import Draw

log = logging.getLogger("mmm")


def plot_summary(ds: "xarray.Dataset", outdir: Path | str) -> list[Path]:
    """Draw what a run leaves under ``outdir/plots``: ``mplot/pngs/summary.png``, with loss, accuracy, the step's time
    in its parts, throughput; ``tplot/summary.txt``, its loss and small plots (100 characters wide, UTF-8).

    Nothing is raised: what cannot be drawn or written is logged as a warning (logger ``mmm``). Returns the files that
    were written.
    """
    folder, loss = Path(outdir), main_loss(ds)
    written = [] if loss is None else save_text(partial(terminal_summary, ds, loss), folder, "summary")
    written += save_pictures({"summary": _summary(ds, folder)}, folder, (".png",), "light")
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
    drawn = metrics(ds) if names is None else list(names)
    written: list[Path] = []
    for name in drawn:
        written += save_text(partial(terminal_plot, ds, name, 100, 24), folder, name)
    figures: dict[str, Draw] = {name: _metric(ds, name) for name in drawn}
    figures |= {"summary": _summary(ds, folder)} if names is None else {}
    written += save_pictures(figures, folder, (".png", ".svg"), theme)
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
