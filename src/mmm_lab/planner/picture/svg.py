"""Writes a drawing as SVG. Text stays text; the reader's setting chooses light or dark."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from mmm.outside import printable_lines
from mmm.palette import AXES, AXES_DARK, DARK, GREY, LIGHT

FONT = "system-ui, -apple-system, Roboto, DejaVu Sans, sans-serif"
# Size of text in pixels. No text is smaller.
TEXT = 12
# Average width of a character and height of a line, as fractions of the size of their text.
CHARACTER = 0.56
LINE = 4 / 3
SQUARE = 12.0
# Width of a stripe of one colour, from left to right.
STRIPE = 2.8


class Drawing:
    """Shapes and texts: x goes to the right, y goes down. Colours are classes, to which the theme gives values."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.elements: list[str] = []
        # Fills of several colours, by their class.
        self.stripes: dict[str, str] = {}

    def add(self, tag: str, text: str = "", /, **attributes: Any) -> None:
        """Add an element. In the name of an attribute ``_`` stands for ``-``, and ``class_`` for ``class``.

        The class is a colour. ``line`` is an outline in the colour of text.
        """
        start_tag = [tag]
        for name, value in attributes.items():
            if isinstance(value, float):
                value = round(value, 2)
            start_tag.append(f"{name.strip('_').replace('_', '-')}={quoteattr(str(value))}")
        self.elements.append(f"<{' '.join(start_tag)}>{_text(text)}</{tag}>")

    def fill(self, colors: Sequence[str]) -> str:
        """The class of a fill in one colour, or with stripes of several, from the upper right to the lower left."""
        name = "-".join(colors)
        if len(colors) == 1:
            return name
        stops = ""
        for index, color in enumerate(colors):
            for edge in (index, index + 1):
                stops += f'<stop offset="{edge / len(colors):.3f}" class="{color}"/>'
        # In units of the page, so that stripes are as wide in every rectangle.
        end = round(STRIPE * len(colors), 1)
        where = f'gradientUnits="userSpaceOnUse" spreadMethod="repeat" x2="{end}" y2="{end}"'
        self.stripes[name] = (
            f'<linearGradient id="{name}" {where}>{stops}</linearGradient><style>.{name}{{fill:url(#{name})}}</style>'
        )
        return name

    def svg(self, height: float, title: str) -> str:
        """The SVG file. The same drawing always gives the same bytes."""
        light = _rules(LIGHT._asdict() | AXES)
        dark = _rules(DARK._asdict() | AXES_DARK)
        rules = f"{light}@media (prefers-color-scheme:dark){{{dark}}}"
        size = f'width="{self.width}" height="{height:.0f}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {height:.0f}" '
            f'font-family="{FONT}">',
            f"<title>{_text(title)}</title><style>{rules}</style>",
            *self.stripes.values(),
            f'<rect {size} class="paper"/>',
            *self.elements,
            "</svg>\n",
        ]
        return "\n".join(lines)


@dataclass
class Column:
    """A column of a drawing. It is filled from top to bottom.

    Attributes:
        left: where it begins, in pixels from the drawing's left side.
        width: in pixels.
        y: how far it is filled, in pixels from the drawing's top.
    """

    drawing: Drawing
    left: float
    width: float
    y: float

    @property
    def right(self) -> float:
        return self.left + self.width

    def text(
        self,
        text: str,
        size: float = TEXT,
        color: str = "muted",
        indent: float = 0.0,
        **attributes: Any,
    ) -> None:
        """Add a text in as many lines as it needs."""
        characters = int((self.width - indent) / (size * CHARACTER))
        for line in textwrap.wrap(text, characters, break_on_hyphens=False):
            self.y += LINE * size
            self.write(line, self.left + indent, size, color, **attributes)

    def write(
        self,
        text: str,
        x: float,
        size: float = TEXT,
        color: str = "ink",
        **attributes: Any,
    ) -> None:
        """Write in the last line."""
        self.drawing.add(
            "text",
            text,
            x=x,
            y=self.y,
            font_size=size,
            class_=color,
            **attributes,
        )

    def square(self, x: float, color: str) -> None:
        """Add a square of a colour to the last line."""
        self.drawing.add(
            "rect",
            x=x,
            y=self.y - SQUARE + 2,
            width=SQUARE,
            height=SQUARE,
            class_=color,
        )

    def heading(self, text: str, size: float) -> None:
        """Add a text in bold, below a gap of half its size."""
        self.y += size / 2
        self.text(text, size, "ink", font_weight=600)

    def beside(self, count: int, gap: float = 0.0) -> list[Column]:
        """Columns of the same width next to each other, below what this one has."""
        width = (self.width + gap) / count - gap
        lefts = [self.left + index * (width + gap) for index in range(count)]
        return [Column(self.drawing, left, width, self.y) for left in lefts]


def _rules(colors: dict[str, str]) -> str:
    """CSS: each class fills with its colour."""
    rules = [f".{name}{{fill:{color};stop-color:{color}}}" for name, color in {**colors, "grey": GREY}.items()]
    return "".join([*rules, f".line{{fill:none;stroke:{colors['ink']}}}"])


def _text(text: str) -> str:
    """Escapes a text. XML has no escape for control characters, which a file's name may have."""
    return escape(printable_lines(text))
