"""Draws a run's summary as a picture, and its loss with characters. A plot that fails is a warning, never the end of a
run.

Command: ``python -m mmm.history.plots.draw OUTDIR``. It also prints what the run's dataset has, and how long
ranks have waited.

A run starts this command in a process of its own when it is over. So what the pictures need, and what may go wrong with
them, does not concern the run.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.plots.own_work import waiting_text
from mmm.history.plots.series import config_of, main_loss
from mmm.history.plots.terminal import terminal_plot
from mmm.history.record.folder import PLOTS
from mmm.history.record.reader import load
from mmm.units import counted

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
    written: list[Path] = []
    for draw in (_draw_picture, _draw_text):
        try:
            written += draw(ds, Path(outdir).absolute(), suffixes)
        except Exception as error:
            # A plotting library may raise anything, or may not be installed. The data is on disk already.
            log.warning("a plot failed: %s: %s", type(error).__name__, error)
    return written


def _draw_picture(ds: "xarray.Dataset", outdir: Path, suffixes: Sequence[str]) -> list[Path]:
    from mmm.history.plots.style import save, style
    from mmm.history.plots.summary import summary_figure

    # By default, a run's folder is outputs/<module>/<timestamp>.
    module = config_of(ds).get("module") or outdir.parent.name
    with style():
        figure = summary_figure(ds, f"{module} · {outdir.name}")
        if figure is None:
            return []
        # mplot/pngs/summary.png, mplot/svgs/summary.svg
        folder = outdir / PLOTS / "mplot"
        return save(figure, *(folder / f"{suffix[1:]}s" / f"summary{suffix}" for suffix in suffixes))


def _draw_text(ds: "xarray.Dataset", outdir: Path, suffixes: Sequence[str]) -> list[Path]:
    loss = main_loss(ds)
    if loss is None:
        return []
    path = outdir / PLOTS / "tplot" / "summary.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(terminal_plot(ds, loss), encoding="utf-8")
    return [path]


def dataset_text(ds: "xarray.Dataset", outdir: Path) -> str:
    """``mmm.history.load("outputs/demo"): 13 rows of 4 ranks; iter, loss, lr, …``."""
    rows = counted(ds.sizes["draw"], "row")
    ranks = counted(ds.sizes["rank"], "rank")
    names = ", ".join(map(str, ds.data_vars))
    return f"mmm.history.load({json.dumps(str(outdir))}): {rows} of {ranks}; {names}"


def main(argv: list[str]) -> int:
    """Draw the run in the folder ``argv[0]``.

    Returns:
        0; or 1 if there is no picture, because the record is a table of measurements, has a single row, or because
        drawing has failed.
    """
    outdir = Path(argv[0])
    try:
        data = load(outdir)
    except RecordError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return 1
    loss = main_loss(data)
    if loss is None or data.sizes["draw"] < 2:
        return 1
    written = plot_summary(data, outdir)
    print(dataset_text(data, outdir), terminal_plot(data, loss), sep="\n\n")
    waiting = waiting_text(data)
    if waiting:
        print(f"waiting for other ranks: {waiting}")
    has_picture = any(path.suffix == ".png" for path in written)
    return 0 if has_picture else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
