"""The shapes and texts that a picture is made of. x goes to the right, y goes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A colour is a field of the theme that a picture is drawn in (`mmm.palette.Theme`), or "#rrggbb" in every theme.
ROLES = ("paper", "ink", "grid", "idle")
CHARACTER = 0.53  # average width of a character, as a fraction of the size of its text


@dataclass(frozen=True)
class Rect:
    """A rectangle: filled, framed or both."""

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
    """A line from one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    line: float = 1.0


@dataclass(frozen=True)
class Text:
    """A line of text.

    Attributes:
        y: position of the baseline.
        anchor: what is at x: the ``start``, ``middle`` or ``end`` of the text.
    """

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: str = "start"
    bold: bool = False
    fill: str = "ink"
    opacity: float = 1.0


Item = Rect | Polygon | Line | Text


@dataclass
class Scene:
    """A picture.

    Attributes:
        title, description: texts for readers who do not see it.
    """

    width: float
    height: float
    title: str
    description: str
    items: list[Item] = field(default_factory=list)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An estimate of a text's width, in the units of a scene."""
    width = len(text) * size * CHARACTER
    return width * 1.13 if bold else width


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Breaks a text into lines that are about as wide as `width`, or less."""
    most = int(width / (size * CHARACTER))
    lines = [""]
    # Greedy: a word goes to a new line if it does not fit.
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def paragraph(
    lines: Sequence[str],
    x: float,
    y: float,
    size: float,
    step: float,
    opacity: float = 1.0,
) -> list[Item]:
    """Lines of text, one below another.

    Args:
        y: position of the first baseline.
        step: distance between two baselines.
    """
    return [
        Text(
            x,
            y + step * index,
            line,
            size=size,
            opacity=opacity,
        )
        for index, line in enumerate(lines)
    ]


def arrow(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    line: float,
    fill: str,
    both: bool = False,
) -> list[Item]:
    """A straight arrow, horizontal or vertical.

    Args:
        line: width of its shaft.
        both: whether both points have a head, or only the second.
    """
    level = y1 == y2
    start, end = (x1, x2) if level else (y1, y2)
    middle = y1 if level else x1
    length = min(max(4.0, 0.9 * line), 12.0)
    if end < start:
        length = -length
    shaft = line / 2
    # The head sticks out on both sides of the shaft.
    head = shaft + 3.5
    stop = end - length
    begin = start + length if both else start
    # Points as (position along the arrow, distance from its middle), around the outline.
    outline = [(begin, shaft), (stop, shaft), (stop, head), (end, 0.0), (stop, -head), (stop, -shaft), (begin, -shaft)]
    if both:
        outline += [(begin, -head), (start, 0.0), (begin, head)]
    if level:
        return [Polygon(tuple((along, middle + off) for along, off in outline), fill)]
    return [Polygon(tuple((middle + off, along) for along, off in outline), fill)]
