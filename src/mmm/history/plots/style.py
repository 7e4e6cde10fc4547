"""The one style of all pictures: matplotlib's parameters, in the colours of `mmm.palette`. At import nothing is set."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.palette import LIGHT, THEMES, Theme

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
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 150,
    "svg.hashsalt": "mmm",
}
INK = ("axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "text.color")
PAPER = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")


@contextmanager
def style(name: str = "light") -> Iterator[None]:
    """Figures that are made inside have the style.

    Args:
        name: of a theme, light or dark.
    """
    import matplotlib

    chosen = THEMES[name]
    colors = dict.fromkeys(INK, chosen.ink) | dict.fromkeys(PAPER, chosen.paper)
    colors |= {"axes.edgecolor": chosen.muted, "grid.color": chosen.grid}
    with matplotlib.rc_context(RC | colors):
        yield


def theme() -> Theme:
    """The one that is set; the light one outside of `style`."""
    import matplotlib

    paper = matplotlib.rcParams["figure.facecolor"]
    return next((known for known in THEMES.values() if known.paper == paper), LIGHT)


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
