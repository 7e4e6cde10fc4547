"""The pictures of a run, drawn with matplotlib on `Figure` objects: no pyplot, no window, no global state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mmm.history.plots.series import (
    AxisLimits,
    Series,
    limits,
    mean_over_ranks,
    metrics,
    outside,
    parts,
    restarts,
    series,
    slowest,
)
from mmm.history.record.dataset import marks_of

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PALE = "#22303c", "#7b8794", "#d9dfe5"
BLUE, ORANGE = "#2563b8", "#d9730d"
PART_COLORS = {"dtd": "#9aa5b1", "dtf": "#7db3e8", "dtb": "#2563b8", "dto": "#e0a840", "dtw": "#c8553d"}
PART_NAMES = {"dtd": "data", "dtf": "forward", "dtb": "backward", "dto": "optimizer", "dtw": "waiting"}
MOST_BARS = 60
MOST_POINTS = 1000  # a line of more is thinned: a page has no more pixels
RC: Any = {
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 150,
    "svg.hashsalt": "mmm",
}


@contextmanager
def style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(RC):
        yield


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def metric_figure(ds: "xarray.Dataset", name: str) -> "Figure":
    """One metric over the steps: a line; or the median over ranks, a band from min to max, a thin line a rank."""
    s = series(ds, name)
    figure = new_figure(7.2, 3.8)
    figure.subplots_adjust(left=0.125, right=0.97, bottom=0.14, top=0.86)  # fixed: every metric lines up
    axes = figure.add_subplot()
    draw_series(axes, s, ds)
    head(axes, s.title if s.title == s.name else sentence(s.title))
    axes.set_xlabel(s.x_name)
    axes.set_ylabel(s.label)
    return figure


def draw_series(axes: "Axes", s: Series, ds: "xarray.Dataset", color: str = BLUE) -> None:
    """Draw `s` and set the limits; a note above the axes names the points outside them."""
    shown = limits(s)
    if shown is None:
        axes.text(0.5, 0.5, "no finite value", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    finite = np.isfinite(s.y)
    x, y = s.x[finite], s.y[finite]
    if s.high is not None and s.low is not None:
        _spread(axes, s, color)
        axes.plot(*thin(x, y), color=color, lw=1.6, label=f"median of {s.ranks} ranks")
    elif s.name.endswith("_argmax"):
        axes.plot(x, y, ".", ms=4, color=color)
    elif s.sparse or len(x) < 3:
        axes.plot(x, y, "o-", ms=4, lw=1.2, color=color)
    elif len(x) >= 100 and noisy(y, middle := running_median(y, window := max(5, len(x) // 40) | 1)):
        axes.plot(*thin(x, y), color=color, lw=0.8, alpha=0.35, label="each row")
        axes.plot(*thin(x, middle), color=color, lw=1.8, label=f"running median of {window}")
    else:
        marker = "o" if len(x) <= 25 else None
        axes.plot(*_with_gaps(x, y, restarts(ds)), color=color, lw=1.6, marker=marker, ms=3, label=s.name)
    set_limits(axes, s, _overlay(axes, s, ds, shown))
    _marks(axes, s.x, ds)


def _with_gaps(x: np.ndarray, y: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The line with a gap before each x in `before`."""
    at = np.searchsorted(x, before)
    return np.insert(x.astype(np.float64), at, np.nan), np.insert(y, at, np.nan)


def _marks(axes: "Axes", x: np.ndarray, ds: "xarray.Dataset") -> None:
    """A line between two rows, where the run was resumed."""
    for number, mark in enumerate(marks_of(ds)):
        first = int(np.searchsorted(ds["draw"].values, mark["draw"]))
        between = x[max(first - 1, 0) : first + 1].mean()
        axes.axvline(between, color=GREY, lw=1.0, ls=":", label="" if number else "resumed")


def _spread(axes: "Axes", s: Series, color: str) -> None:
    if s.low is None or s.high is None:
        return
    x, low = thin(s.x, s.low, np.fmin)
    _, high = thin(s.x, s.high, np.fmax)
    axes.fill_between(x, low, high, color=color, alpha=0.18, lw=0, label="min to max")
    if s.by_rank is not None:
        width = 0.5 if s.ranks > 8 else 0.7
        for rank in range(s.by_rank.shape[1]):
            axes.plot(*thin(s.x, s.by_rank[:, rank]), color=color, lw=width, alpha=0.35)
        if (slow := slowest(s)) is not None:
            axes.plot(*thin(s.x, s.by_rank[:, slow]), color=ORANGE, lw=1.0, alpha=0.8, label=f"rank {slow}, slowest")


def _overlay(axes: "Axes", s: Series, ds: "xarray.Dataset", shown: AxisLimits) -> AxisLimits:
    """Draw the validation or test metric of the same name as markers. Returns limits that have it inside."""
    twins = (f"val_{s.name}", f"test_{s.name.removeprefix('train_')}")
    twin = next((name for name in twins if name in metrics(ds) and name != s.name), None)
    if twin is None:
        return shown
    v = series(ds, twin)
    finite = np.isfinite(v.y)
    if not finite.any():
        return shown
    axes.plot(v.x[finite], v.y[finite], "o", ms=5, mfc="white", mec=ORANGE, mew=1.5, label=twin, zorder=5)
    low, high = float(v.y[finite].min()), float(v.y[finite].max())
    return shown._replace(low=min(shown.low, low), high=max(shown.high, high))


def set_limits(axes: "Axes", s: Series, shown: AxisLimits) -> None:
    """Limits with a margin; triangles at the edge and a note above the axes for points outside."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    margin = 0.06 * (shown.high - shown.low) or 0.05 * abs(shown.high) or 1.0
    low, high = shown.low - margin, shown.high + margin
    if shown.low >= 0 > low or (shown.low >= 0 and shown.low < 0.35 * shown.high):
        low = 0.0  # close to zero: show it
    finite = s.y[np.isfinite(s.y)]
    logarithmic = "loss" in s.name and finite.min() > 0 and finite.max() > 100 * finite.min()
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(low, high)
    beside = 0.55 * bar_step(s.x) if len(s.x) <= MOST_BARS else 0.01 * float(s.x[-1] - s.x[0])
    axes.set_xlim(s.x[0] - beside, s.x[-1] + beside)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10]))
    if not logarithmic and max(abs(low), abs(high)) >= 1e6:
        axes.yaxis.set_major_formatter(EngFormatter())
    elif not logarithmic and max(abs(low), abs(high)) >= 1e4:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    elif not logarithmic and max(abs(low), abs(high)) < 1e-3:
        axes.yaxis.set_major_formatter("{x:.1e}")
    if s.name.endswith("_argmax"):
        axes.set_ylim(-0.5, s.ranks - 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    for where, edge, marker in ((shown.above, high, "^"), (shown.below, low, "v")):
        if where.any():
            axes.plot(s.x[where], np.full(where.sum(), edge), marker, color=ORANGE, ms=6, clip_on=False, zorder=6)
    if note := outside(s, shown):
        axes.text(0, 1.02, note, transform=axes.transAxes, color=ORANGE, fontsize=8.5, va="bottom")


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def head(axes: "Axes", title: str, size: float = 12) -> None:
    """Title (left) and legend (right) above the axes, and above the note if there is one."""
    up = 20 if axes.texts else 6  # points
    axes.set_title(title, fontsize=size, pad=up, y=1.0)  # y: not computed at each draw
    if len(axes.get_legend_handles_labels()[0]) > 1:
        tall = axes.get_window_extent().height * 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
        corner = (1.01, 1 + (up - 3) / tall)
        axes.legend(
            ncols=6,
            loc="lower right",
            bbox_to_anchor=corner,
            borderpad=0,
            borderaxespad=0.2,
            columnspacing=1.1,
            handlelength=1.2,
        )


def summary_figure(ds: "xarray.Dataset", name: str) -> "Figure | None":
    """The run on one page: loss, accuracy, parts of the step's time, throughput. None without any of them."""
    known = metrics(ds)
    split = parts(ds)
    names = {
        "loss": next((n for n in ("loss", "train_loss") if n in known), None),
        "accuracy": "test_acc" if "test_acc" in known else None,
        "time": "dt" if split or "dt" in known else None,
        "rate": next((n for n in ("tps", "sps") if n in known), None),
    }
    panels = {panel: n for panel, n in names.items() if n is not None}
    if not panels or not ds.sizes["draw"]:
        return None
    height = 0.95 + 2.5 * len(panels)
    figure = new_figure(8.0, height)
    figure.text(0.02, 1 - 0.12 / height, name, fontsize=13, fontweight="bold", va="top")
    figure.text(0.02, 1 - 0.40 / height, facts(ds), color=GREY, fontsize=9, va="top")
    figure.subplots_adjust(left=0.125, right=0.97, bottom=0.5 / height, top=1 - 0.95 / height, hspace=0.3)
    rows: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (panel, metric) in zip(rows, panels.items(), strict=True):
        if panel == "time" and split:
            _stack(axes, ds, split)
            continue
        s = series(ds, metric)
        draw_series(axes, s, ds, color="#2f855a" if panel == "rate" else BLUE)
        head(axes, sentence(s.title), 10.5)
        axes.set_ylabel(s.label)
    rows[-1].set_xlabel(series(ds, known[0]).x_name)
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
    heights = [thin(x[finite], np.nan_to_num(part[finite])) for part in split.values()]
    steps, base = heights[0][0], np.zeros(len(heights[0][0]))
    bars = len(steps) <= MOST_BARS  # with few steps, an area would join a slow first step to the second
    for name, (_, part) in zip(split, heights, strict=True):
        if bars:
            axes.bar(steps, part, 0.85 * bar_step(steps), base, color=PART_COLORS[name], label=PART_NAMES[name])
        else:
            axes.fill_between(steps, base, base + part, color=PART_COLORS[name], lw=0, label=PART_NAMES[name])
        base = base + part
    axes.plot(*thin(x[finite], full[finite]), "_" if bars else "-", color=INK, lw=1.0, label=f"full {span}")
    set_limits(axes, total, shown)
    axes.set_ylim(0, shown.high * 1.06)
    _marks(axes, x, ds)
    reduction = "mean" if "dt" in ds or "dtf" in ds else "median"
    over = f", {reduction} over ranks" if ds.sizes.get("rank", 1) > 1 else ""
    head(axes, f"Time of {'an' if span == 'epoch' else 'a'} {span}", 10.5)
    axes.set_ylabel(f"dt [s]{over}")


def facts(ds: "xarray.Dataset") -> str:
    """One line about the run: rows, ranks, hosts, mesh."""
    ranks = ds.sizes.get("rank", 1)
    says = [f"{ds.sizes['draw']} rows", f"{ranks} rank{'s' if ranks > 1 else ''}"]
    if "host" in ds.coords:
        hosts = len(set(ds["host"].values.tolist()))
        says.append(f"{hosts} host{'s' if hosts > 1 else ''}")
    axes = [
        (str(name)[5:], int(ds[name].max()) + 1)
        for name in ds.coords
        if str(name).startswith("axis_") and ds[name].dtype.kind in "iu"
    ]
    return " · ".join(says + [f"{axis} {size}" for axis, size in axes if size > 1])


def thin(x: np.ndarray, y: np.ndarray, keep: np.ufunc | None = None) -> tuple[np.ndarray, np.ndarray]:
    """At most `MOST_POINTS` points: every k-th, or of each k the one that `keep` (np.fmax, np.fmin) selects."""
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.arange(0, len(x), -(-len(x) // MOST_POINTS))
    return x[starts], y[starts] if keep is None else keep.reduceat(y, starts)


def bar_step(x: np.ndarray) -> float:
    """The smallest distance between two steps."""
    return float(np.diff(x).min()) if len(x) > 1 else 1.0


def noisy(y: np.ndarray, middle: np.ndarray) -> bool:
    """Whether `y` differs from `middle` by more than 0.5 % of its range at most rows."""
    return bool(np.median(np.abs(y - middle)) > 0.005 * (np.max(y) - np.min(y)))


def running_median(y: np.ndarray, window: int) -> np.ndarray:
    """The median over `window` rows around each row, over fewer at the ends."""
    half = window // 2
    padded = np.pad(y, half, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
