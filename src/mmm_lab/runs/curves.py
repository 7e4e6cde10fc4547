"""Draws several curves against the number of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import RecordError
from mmm.history.plots.style import new_figure, save, style
from mmm.history.record.folder import reason
from mmm.palette import SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[float, float]]]  # name → points (number of ranks, seconds)


def curves_figure(curves: Curves) -> "Figure":
    """A plot of start-up times by the number of ranks, in seconds: a curve for each name."""
    figure = new_figure(5.2, 3.8)
    figure.subplots_adjust(left=0.14, right=0.97, bottom=0.14, top=0.93)
    axes = figure.subplots()
    # Colours repeat if there are more curves.
    for (name, curve), color in zip(curves.items(), SERIES * len(curves), strict=False):
        ranks, values = zip(*sorted(curve), strict=True)
        axes.plot(
            ranks,
            values,
            "o-",
            label=name,
            ms=4,
            lw=1.5,
            color=color,
            clip_on=False,
            zorder=3,
        )
    all_ranks = sorted({ranks for curve in curves.values() for ranks, _ in curve})
    # Few numbers of ranks are all named on the axis.
    if len(all_ranks) <= 8:
        axes.set_xticks(all_ranks, [f"{ranks:g}" for ranks in all_ranks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("start-up [s]")
    axes.legend()
    return figure


def save_curves(curves: Curves, path: Path) -> Path:
    """Write `curves_figure` to `path`, in the picture format of its suffix.

    Raises:
        RecordError: the file cannot be written, or the suffix is not a picture format.
    """
    with style():
        try:
            save(curves_figure(curves), path)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {reason(error)}. Give another file.") from error
        except ValueError as error:
            # matplotlib names the suffixes that it knows.
            raise RecordError(f"cannot draw {path}: {error}.") from error
    return path
