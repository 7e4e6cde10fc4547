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
        wrong += [f"{name}: {flaw}" for flaw in [*_markers(axes, renderer), *_names(axes)]]
        boxes = {"title": axes._left_title} | {f"text {text.get_text()!r}": text for text in axes.texts}
        boxes |= {f"label {label.get_text()!r}": label for label in _labels(axes)}
        boxes |= {"x name": axes.xaxis.label, "y name": axes.yaxis.label}
        for kind, text in boxes.items():
            if text.get_text() and text.get_visible() and not _inside(text, figure.bbox, renderer):
                wrong.append(f"{name}: {kind} is cut")
        if (legend := axes.get_legend()) is not None:
            if not _inside(legend, figure.bbox, renderer):
                wrong.append(f"{name}: the legend is cut")
            box = legend.get_window_extent(renderer)
            if box.overlaps(axes._left_title.get_window_extent(renderer)):
                wrong.append(f"{name}: title and legend lie on each other")
            # What of the bars is inside the axes.
            bars = [Bbox.intersection(bar.get_window_extent(renderer), axes.bbox) for bar in axes.patches]
            if any(bar is not None and box.overlaps(bar) for bar in bars):
                wrong.append(f"{name}: the legend lies on a bar")
    cut = [text for text in figure.texts if not _inside(text, figure.bbox, renderer)]
    return wrong + [f"figure: {text.get_text()!r} is cut" for text in cut]


def _labels(axes: Any) -> Iterator[Any]:
    """Of the ticks that are drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def _inside(artist: Any, frame: Any, renderer: Any) -> bool:
    """Whether all of a text or a legend is inside of a frame, up to `SLACK`."""
    box = artist.get_window_extent(renderer)
    return bool((box.min >= frame.min - SLACK).all() and (box.max <= frame.max + SLACK).all())


def _markers(axes: Any, renderer: Any) -> Iterator[str]:
    """Lines whose markers the frame of the axes cuts."""
    frame = axes.get_window_extent(renderer)
    for line in axes.lines:
        if line.get_marker() in (None, "", "None", "none", " "):
            continue
        points = line.get_transform().transform(np.asarray(line.get_xydata(), float))
        points = points[np.isfinite(points).all(axis=1)]
        radius = line.get_markersize() / 2 * axes.figure.dpi / 72
        # What is clipped has to be inside with its edge.
        spare = radius if line.get_clip_on() else 0.0
        low = points - spare - (frame.x0, frame.y0) + SLACK
        high = (frame.x1, frame.y1) - points - spare + SLACK
        if len(points) and not ((low >= 0) & (high >= 0)).all():
            yield f"markers of {line.get_label()!r} outside the axes, or cut"


def _names(axes: Any) -> Iterator[str]:
    """Lines that a reader cannot tell apart, as no legend names them."""
    shown = axes.get_legend() or next(iter(axes.figure.legends), None)
    labels = {text.get_text() for text in shown.get_texts()} if shown is not None else set()
    # Arrows have their note above.
    colors = {str(line.get_color()) for line in axes.lines if line.get_marker() not in "^v"}
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if len({str(line.get_color()) for line in lines}) > 1:
        yield from (f"no legend names {line.get_label()!r}" for line in lines if line.get_label() not in labels)
    if len(colors) > 1 and shown is None:
        yield "lines of several colours, and no legend"
