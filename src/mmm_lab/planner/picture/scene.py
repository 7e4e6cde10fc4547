"""What a picture is made of: shapes and texts in a plane, for whatever draws them. x goes right, y goes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A colour is one of these, of the theme that a picture is drawn in (`mmm.palette.Theme`), or "#rrggbb" in all.
ROLES = ("paper", "ink", "grid", "idle")
CHARACTER = 0.53  # width of a character on average, of the size of its text


@dataclass(frozen=True)
class Rect:
    """Filled, framed or both."""

    x: float
    y: float
    width: float
    height: float
    fill: str = ""
    stroke: str = ""
    line: float = 1.0
    radius: float = 0.0
    opacity: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Polygon:
    points: tuple[tuple[float, float], ...]
    fill: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Line:
    """From one point to another, with a head at its end, at both, or at none."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    line: float = 1.0


@dataclass(frozen=True)
class Text:
    """anchor: what of it is at x: ``start``, ``middle`` or ``end``; y: of its baseline."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: str = "start"
    bold: bool = False
    fill: str = "ink"
    opacity: float = 1.0

    @property
    def width(self) -> float:
        """About."""
        return text_width(self.text, self.size, self.bold)


Item = Rect | Polygon | Line | Text


@dataclass
class Scene:
    """title, description: for who does not see it."""

    width: float
    height: float
    title: str
    description: str
    items: list[Item] = field(default_factory=list)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """About, in the units of a scene."""
    return len(text) * size * CHARACTER * (1.13 if bold else 1.0)


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Lines that are not wider, about."""
    lines, most = [""], int(width / (size * CHARACTER))
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def paragraph(lines: Sequence[str], x: float, y: float, size: float, step: float, opacity: float = 1.0) -> list[Item]:
    """Lines of text, one below the other; y: the baseline of the first."""
    return [Text(x, y + step * number, line, size, opacity=opacity) for number, line in enumerate(lines)]


def arrow(x1: float, y1: float, x2: float, y2: float, line: float, fill: str, both: bool = False) -> list[Item]:
    """A straight arrow, level or upright, as wide as `line`; its head is at the second point, or at both."""
    level, head = y1 == y2, min(max(4.0, 0.9 * line), 12.0)
    wide, half = line / 2 + 3.5, line / 2
    start, end = (x1, x2) if level else (y1, y2)
    step = 1 if end > start else -1
    begin, stop = (start + step * head if both else start), end - step * head
    tail = [(begin, -wide), (start, 0.0), (begin, wide)] if both else []
    outline = [(begin, half), (stop, half), (stop, wide), (end, 0.0), (stop, -wide), (stop, -half), (begin, -half)]
    middle = y1 if level else x1
    points = [(at, middle + off) if level else (middle + off, at) for at, off in (*outline, *tail)]
    return [Polygon(tuple(points), fill)]
