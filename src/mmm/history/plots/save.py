"""Pictures and texts of any kind, to files under a run's folder. What fails is a warning, never the end of a run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.history.record.folder import PLOTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Draw = Callable[[], Figure | None]

log = logging.getLogger("mmm")


def save_pictures(figures: "Mapping[str, Draw]", folder: Path, suffixes: Sequence[str], theme: str) -> list[Path]:
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


def save_text(draw: Callable[[], str], folder: Path, name: str) -> list[Path]:
    """Write ``plots/tplot/<name>.txt``, and return it if it was written."""

    def write() -> list[Path]:
        path = folder / PLOTS / "tplot" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw(), encoding="utf-8")
        return [path]

    return _attempt(name, write)


def _attempt(name: str, draw: Callable[[], list[Path]]) -> list[Path]:
    try:
        return draw()
    except Exception as error:  # anything a plotting library raises: the data is on disk already
        log.warning("plot %s failed: %s: %s", name, type(error).__name__, error)
        return []


def _picture(draw: "Draw", folder: Path, name: str, suffixes: Sequence[str]) -> list[Path]:
    from mmm.history.plots.style import save

    figure = draw()
    if figure is None:
        return []
    return save(figure, *(folder / PLOTS / "mplot" / f"{kind[1:]}s" / f"{name}{kind}" for kind in suffixes))
