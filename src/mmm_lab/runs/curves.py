"""Several curves against the number of ranks, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.plots.style import new_figure, save, style
from mmm.history.record.folder import reason
from mmm.palette import SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[float, float]]]  # name: its points


def curves_figure(panels: Mapping[str, Curves]) -> "Figure":
    """A panel for each set of curves, `panels` by the name of its y axis, side by side."""
    figure = new_figure(5.2 * len(panels), 3.8)
    figure.subplots_adjust(left=0.14 / len(panels), right=0.97, bottom=0.14, top=0.93, wspace=0.25)
    for axes, (label, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for (name, curve), color in zip(curves.items(), SERIES * len(curves), strict=False):
            look = {"ms": 4, "lw": 1.5, "color": color, "clip_on": False, "zorder": 3}
            axes.plot(*zip(*sorted(curve), strict=True), "o-", label=name, **look)
        ranks = sorted({x for curve in curves.values() for x, _ in curve})
        if len(ranks) <= 8:
            axes.set_xticks(ranks, [f"{x:g}" for x in ranks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.legend()
    return figure


def save_curves(panels: Mapping[str, Curves], path: Path) -> Path:
    """Write `curves_figure` to `path`, in the picture format of its suffix.

    Raises:
        RecordError: it cannot be written, or the suffix is no picture format.
    """
    with style():
        try:
            save(curves_figure(panels), path)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {reason(error)}. Give another file.") from error
        except ValueError as error:  # matplotlib names the suffixes it knows
            raise RecordError(f"cannot draw {path}: {error}.") from error
    return path
