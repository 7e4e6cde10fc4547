"""The one style of all pictures: matplotlib's parameters, in the colours of `mmm.palette`. At import nothing is set."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RC: Any = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": LIGHT.muted,
    "grid.linewidth": 0.6,
    "grid.color": LIGHT.grid,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 150,
    "svg.hashsalt": "mmm",
}
INK = ("axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "text.color")


@contextmanager
def style() -> Iterator[None]:
    """Figures that are made inside have the style."""
    # Of a notebook, and perhaps not installed here, where no window is opened: matplotlib would fail.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend

    with matplotlib.rc_context(RC | dict.fromkeys(INK, LIGHT.ink)):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """Of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def save(figure: "Figure", *paths: Path) -> list[Path]:
    """Write a figure in the formats of the paths' suffixes, with no date in it: the same figure, the same file."""
    options: Mapping[str, dict[str, Any]] = {
        ".png": {"pil_kwargs": {"compress_level": 3}},
        ".svg": {"metadata": {"Date": None}},
    }
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, **options.get(path.suffix, {}))
    return list(paths)
