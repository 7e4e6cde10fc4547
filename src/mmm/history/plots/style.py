"""The style of all pictures: matplotlib's parameters, in the colours of `mmm.palette`. Importing it sets nothing."""

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
# Parameters that have the colour of text.
INK = ("axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "text.color")


@contextmanager
def style() -> Iterator[None]:
    """Give figures that are made in the ``with`` block the style."""
    # A notebook sets MPLBACKEND to a backend of its own. If that is not installed here, importing matplotlib fails,
    # although no window is opened.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend

    with matplotlib.rc_context(RC | dict.fromkeys(INK, LIGHT.ink)):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure, without pyplot. Sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def save(figure: "Figure", *paths: Path) -> list[Path]:
    """Write a figure to files, in the formats of their suffixes, and return the paths.

    The files have no date in them: the same figure gives the same file.
    """
    options: Mapping[str, dict[str, Any]] = {
        ".png": {"pil_kwargs": {"compress_level": 3}},
        ".svg": {"metadata": {"Date": None}},
    }
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, **options.get(path.suffix, {}))
    return list(paths)
