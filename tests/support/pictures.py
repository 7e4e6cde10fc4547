"""What is true of every picture that is fit to be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

# Pixels.
SLACK = 1.5


def flaws(figure: Any) -> list[str]:
    """What is wrong with a figure: points outside their axes, markers and texts that are cut, titles and legends that
    lie on each other, legends on bars, lines that no legend names."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    wrong = []
    for axes in figure.axes:
        name = axes.get_title(loc="left") or axes.get_ylabel()
        for find in (_markers, _texts, _legend, _names):
            wrong += [f"{name}: {flaw}" for flaw in find(axes, renderer)]
    # What belongs to no axes, as a title over all of them.
    for text in figure.texts:
        if not _inside(text, renderer):
            wrong.append(f"figure: {text.get_text()!r} is cut")
    return wrong


def _texts(axes: Any, renderer: Any) -> Iterator[str]:
    """Texts that the figure's edge cuts."""
    texts = {"title": axes._left_title, "x name": axes.xaxis.label, "y name": axes.yaxis.label}
    for text in axes.texts:
        texts[f"text {text.get_text()!r}"] = text
    for label in _labels(axes):
        texts[f"label {label.get_text()!r}"] = label
    for kind, text in texts.items():
        is_drawn = text.get_text() and text.get_visible()
        if is_drawn and not _inside(text, renderer):
            yield f"{kind} is cut"


def _legend(axes: Any, renderer: Any) -> Iterator[str]:
    """What is wrong with the place of the legend."""
    legend = axes.get_legend()
    if legend is None:
        return
    if not _inside(legend, renderer):
        yield "the legend is cut"
    box = legend.get_window_extent(renderer)
    title = axes._left_title.get_window_extent(renderer)
    if box.overlaps(title):
        yield "title and legend lie on each other"
    for patch in axes.patches:
        # Of a bar, what is inside the axes: None where nothing is.
        bar = Bbox.intersection(patch.get_window_extent(renderer), axes.bbox)
        if bar is not None and box.overlaps(bar):
            yield "the legend lies on a bar"
            # One such bar is enough to say so.
            return


def _labels(axes: Any) -> Iterator[Any]:
    """Of the ticks that are drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if low <= tick.get_loc() <= high:
                yield tick.label1


def _inside(artist: Any, renderer: Any) -> bool:
    """Whether all of a text or a legend is inside of its figure, up to `SLACK`."""
    box = artist.get_window_extent(renderer)
    frame = artist.figure.bbox
    # Both corners, (x, y): the lower left one, and the upper right one.
    low = box.min - frame.min + SLACK
    high = frame.max + SLACK - box.max
    return bool((low >= 0).all() and (high >= 0).all())


def _markers(axes: Any, renderer: Any) -> Iterator[str]:
    """Lines whose markers the frame of the axes cuts."""
    frame = axes.get_window_extent(renderer)
    for line in axes.lines:
        # How matplotlib spells that there is none.
        if line.get_marker() in (None, "", "None", "none", " "):
            continue
        # (points, 2), in pixels.
        data = np.asarray(line.get_xydata(), float)
        points = line.get_transform().transform(data)
        is_drawn = np.isfinite(points).all(axis=1)
        points = points[is_drawn]
        # A size is in points, of which an inch has 72.
        radius = line.get_markersize() / 2 * axes.figure.dpi / 72
        # What is clipped has to be inside with its edge.
        spare = radius if line.get_clip_on() else 0.0
        low = points - spare - (frame.x0, frame.y0) + SLACK
        high = (frame.x1, frame.y1) - points - spare + SLACK
        is_inside = (low >= 0) & (high >= 0)
        # Without a point it is true.
        if not is_inside.all():
            yield f"markers of {line.get_label()!r} outside the axes, or cut"


def _names(axes: Any, renderer: Any) -> Iterator[str]:
    """Lines that a reader cannot tell apart, as no legend names them."""
    shown = axes.get_legend() or next(iter(axes.figure.legends), None)
    labels = set()
    if shown is not None:
        labels = {text.get_text() for text in shown.get_texts()}
    # Matplotlib gives lines that have no label of their own one that begins with this.
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if len(_colors(lines)) > 1:
        for line in lines:
            if line.get_label() not in labels:
                yield f"no legend names {line.get_label()!r}"
    # Arrows have their note above.
    without_arrows = [line for line in axes.lines if line.get_marker() not in "^v"]
    if len(_colors(without_arrows)) > 1 and shown is None:
        yield "lines of several colours, and no legend"


def _colors(lines: list[Any]) -> set[str]:
    """A color may be an array, which no set takes."""
    return {str(line.get_color()) for line in lines}
