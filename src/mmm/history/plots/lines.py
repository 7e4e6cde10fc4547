"""Several curves in one picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmm.history.plots.series import Series
from mmm.palette import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1000  # a line of more is thinned: a page has no more pixels
FEW = 3  # fewer points are no curve: each is marked
DASHES = ("-", "--", ":", "-.")  # by which lines beyond the colours differ
WIDTH, WIDEST = 1.6, 9.0  # points


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def draw_lines(axes: "Axes", curves: Sequence[tuple[str, Series]]) -> None:
    """Each in a colour of its own. Of curves that coincide the first is the widest, so that each is seen."""
    for place, (name, s) in enumerate(curves):
        above = sum(_coincide(s, other) for _, other in curves[place + 1 :])
        finite = np.isfinite(s.y)
        axes.plot(
            *thin(s.x[finite], s.y[finite]),
            DASHES[place // len(SERIES) % len(DASHES)],
            color=SERIES[place % len(SERIES)],
            lw=min(WIDTH * (1 + 1.3 * above), WIDEST),
            marker="o" if len(s.x) < FEW else None,
            ms=4,
            clip_on=len(s.x) >= FEW,
            solid_capstyle="butt",
            label=name,
        )


def _coincide(a: Series, b: Series) -> bool:
    """Whether one curve would hide the other."""
    if len(a.y) != len(b.y) or not len(a.y):
        return False
    span = max(float(np.ptp(a.y)), 1e-12 * abs(float(a.y[0])))
    return bool(np.all(a.x == b.x) and np.all(np.abs(a.y - b.y) <= 5e-3 * span))


def thin(x: np.ndarray, y: np.ndarray, keep: np.ufunc | None = None) -> tuple[np.ndarray, np.ndarray]:
    """At most `MOST_POINTS` points: every k-th, or of each k the one that `keep` (np.fmax, np.fmin) selects."""
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.arange(0, len(x), -(-len(x) // MOST_POINTS))
    return x[starts], y[starts] if keep is None else keep.reduceat(y, starts)
