"""A scene as PNG, by matplotlib: the same shapes and texts as in its SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.patches import Polygon as Shape

from mmm.palette import THEMES, Theme
from mmm.plan.picture.scene import Item, Line, Polygon, Rect, Scene

UNITS, DPI = 100.0, 200  # of a scene in an inch
POINTS = 72 / UNITS  # of a unit
FONT = 0.92  # DejaVu Sans is wider than what browsers show


def write_png(scene: Scene, path: Path, theme: str = "light") -> None:
    """Raises OSError: it cannot be written."""
    colors = THEMES["light" if theme == "auto" else theme]
    figure = Figure(figsize=(scene.width / UNITS, scene.height / UNITS), dpi=DPI, facecolor=colors.paper)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.set_axis_off()
    for order, item in enumerate(scene.items):
        _add(axes, item, colors, order)
    figure.savefig(path, format="png", facecolor=colors.paper, metadata={"Software": None, "Title": scene.title})


def _add(axes: Any, item: Item, theme: Theme, order: int) -> None:
    def color(name: str) -> str:
        return getattr(theme, name, name) or "none"

    if isinstance(item, Rect):
        look: dict[str, Any] = {
            "facecolor": color(item.fill),
            "edgecolor": color(item.stroke),
            "linewidth": item.line * POINTS if item.stroke else 0,
            "alpha": item.opacity,
            "linestyle": (0, (4, 3)) if item.dashed else "-",
            "zorder": order,
        }
        corner, sides = (item.x, item.y), (item.width, item.height)
        if item.radius:
            shape: Any = FancyBboxPatch(corner, *sides, f"round,pad=0,rounding_size={item.radius}", **look)
        else:
            shape = Rectangle(corner, *sides, **look)
        axes.add_patch(shape)
    elif isinstance(item, Polygon):
        axes.add_patch(Shape(item.points, facecolor=color(item.fill), alpha=item.opacity, linewidth=0, zorder=order))
    elif isinstance(item, Line):
        ends = [item.x1, item.x2], [item.y1, item.y2]
        axes.plot(*ends, color=color(item.stroke), linewidth=item.line * POINTS, zorder=order, solid_capstyle="butt")
    else:
        place = {"start": "left", "middle": "center", "end": "right"}[item.anchor]
        axes.text(
            item.x,
            item.y,
            item.text.replace("$", r"\$"),
            fontsize=item.size * POINTS * FONT,
            color=color(item.fill),
            alpha=item.opacity,
            ha=place,
            va="baseline",
            weight="bold" if item.bold else "normal",
            zorder=order,
        )
