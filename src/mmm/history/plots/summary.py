"""A run on one page: loss, accuracy, where the time of a step went, throughput."""

from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.history.plots.figures import (
    MOST_BARS,
    bar_step,
    draw_series,
    head,
    resumptions,
    set_limits,
)
from mmm.history.plots.lines import sentence, thin
from mmm.history.plots.series import (
    PART_NAMES,
    Series,
    facts,
    limits,
    main_loss,
    mean_over_ranks,
    metrics,
    parts,
    series,
)
from mmm.history.plots.style import new_figure, theme
from mmm.palette import STEP_PARTS

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def summary_figure(ds: "xarray.Dataset", name: str) -> "Figure | None":
    """The run on one page. None without anything to show.

    Args:
        name: of the run, for the title.
    """
    loss = main_loss(ds)
    known, split = metrics(ds), parts(ds)
    names = {
        "loss": loss,
        "accuracy": "test_acc" if "test_acc" in known else None,
        "time": "dt" if split or "dt" in known else None,
        "rate": next((n for n in ("tps", "sps") if n in known), None),
    }
    panels = {panel: n for panel, n in names.items() if n is not None}
    if not panels or not ds.sizes["draw"]:
        return None
    height = 0.95 + 2.6 * len(panels)
    figure = _page(ds, name, height)
    rows: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (panel, metric) in zip(rows, panels.items(), strict=True):
        if panel == "time" and split:
            _stack(axes, ds, split)
            continue
        s = series(ds, metric)
        draw_series(axes, s, ds)
        head(axes, sentence(s.title), 10.5)
        axes.set_ylabel(s.label)
    for axes in rows:
        axes.set_xlabel("")
    rows[-1].set_xlabel(series(ds, known[0]).x_name)
    return figure


def _page(ds: "xarray.Dataset", name: str, height: float) -> "Figure":
    figure = new_figure(8.0, height)
    figure.text(0.02, 1 - 0.12 / height, name, fontsize=13, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.40 / height, facts(ds), color=theme().muted, fontsize=9, va="top")
    figure.subplots_adjust(left=0.125, right=0.97, bottom=0.5 / height, top=1 - 1.1 / height, hspace=0.4)
    return figure


def _stack(axes: "Axes", ds: "xarray.Dataset", split: dict[str, np.ndarray]) -> None:
    """The parts of a step stacked, and the full step as a line: the gap is time that no part accounts for."""
    full = parts_sum = np.sum([np.nan_to_num(part) for part in split.values()], axis=0)
    first = series(ds, next(iter(split)))
    x, x_name = first.x, first.x_name
    if "dt" in metrics(ds):
        first = series(ds, "dt")
        full = mean_over_ranks(first)
    span = "epoch" if x_name == "epoch" else "step"
    finite = np.isfinite(full)
    total = Series("dt", "time of a step", "s", x[finite], x_name, np.maximum(full, parts_sum)[finite])
    shown = limits(total)
    if shown is None:
        return
    shown = shown._replace(low=0.0, below=np.zeros_like(shown.below))  # bars begin at zero: none is below
    heights = [thin(x[finite], np.nan_to_num(part[finite])) for part in split.values()]
    steps, base = heights[0][0], np.zeros(len(heights[0][0]))
    bars = len(steps) <= MOST_BARS  # with few steps, an area would join a slow first step to the second
    for name, (_, part) in zip(split, heights, strict=True):
        if bars:
            axes.bar(steps, part, 0.85 * bar_step(steps), base, color=STEP_PARTS[name], label=PART_NAMES[name])
        else:
            axes.fill_between(steps, base, base + part, color=STEP_PARTS[name], lw=0, label=PART_NAMES[name])
        base = base + part
    axes.plot(*thin(x[finite], full[finite]), "_" if bars else "-", color=theme().ink, lw=1.0, label=f"full {span}")
    set_limits(axes, total, shown)
    resumptions(axes, x, ds)
    reduction = "mean" if "dt" in ds or "dtf" in ds else "median"
    over = f", {reduction} over ranks" if ds.sizes.get("rank", 1) > 1 else ""
    head(axes, f"Time of {'an' if span == 'epoch' else 'a'} {span}", 10.5)
    axes.set_ylabel(f"dt [s]{over}")
