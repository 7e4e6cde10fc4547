"""Writes a drawing as SVG. Text stays text; under the theme ``auto`` the reader's setting chooses light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from mmm.outside import printable_lines
from mmm.palette import AXES, AXES_DARK, DARK, GREY, LIGHT

FONT = "system-ui, -apple-system, Roboto, DejaVu Sans, sans-serif"
CHARACTER = 0.56  # average width of a character, as a fraction of the size of its text
STRIPE = 2.8  # of a stripe of one colour, from left to right


class Drawing:
    """Shapes and texts: x goes to the right, y goes down. Colours are classes, to which the theme gives values."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.elements: list[str] = []

    def add(self, tag: str, content: str = "", **attributes: Any) -> None:
        """Add an element. In the name of an attribute ``_`` stands for ``-``, and ``class_`` for ``class``."""
        start_tag = [tag]
        for name, value in attributes.items():
            if isinstance(value, float):
                value = round(value, 2)
            start_tag.append(f"{name.strip('_').replace('_', '-')}={quoteattr(str(value))}")
        self.elements.append(f"<{' '.join(start_tag)}>{content}</{tag}>")

    def rect(self, box: tuple[float, float, float, float], color: str, **attributes: Any) -> None:
        """Add a rectangle: x, y, width and height. The colour ``line`` is an outline in the colour of text."""
        x, y, width, height = box
        self.add("rect", x=x, y=y, width=width, height=height, class_=color, **attributes)

    def text(self, x: float, y: float, text: str, size: float = 12, color: str = "ink", **attributes: Any) -> None:
        """Add a line of text with its baseline at y."""
        self.add("text", _text(text), x=x, y=y, font_size=size, class_=color, **attributes)

    def paragraph(self, x: float, y: float, text: str, width: float, color: str = "muted") -> float:
        """Add a text in lines of at most `width`, and return where they end."""
        lines = [""]
        for word in text.split():
            # Greedy: a word goes to a new line if it does not fit.
            if len(f"{lines[-1]} {word}") * 12 * CHARACTER > width:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
        for line in lines:
            y += 16
            self.text(x, y, line, color=color)
        return y

    def stripes(self, colors: Sequence[str]) -> str:
        """The name of a fill with stripes of some colours, from the upper right to the lower left."""
        name = "-".join(colors)
        stops = []
        for index, color in enumerate(colors):
            for edge in (index, index + 1):
                stops.append(f'<stop offset="{edge / len(colors):.3f}" class="{color}"/>')
        # In units of the page, so that stripes are as wide in every rectangle. The same element twice does no harm.
        end = STRIPE * len(colors)
        self.add(
            "linearGradient",
            "".join(stops),
            id=name,
            gradientUnits="userSpaceOnUse",
            spreadMethod="repeat",
            x2=end,
            y2=end,
        )
        return f"fill:url(#{name})"

    def svg(self, height: float, title: str, theme: str = "auto") -> str:
        """The SVG file. The same drawing always gives the same bytes.

        Args:
            theme: ``auto``, ``light`` or ``dark``.
        """
        light = _rules(LIGHT._asdict() | AXES)
        dark = _rules(DARK._asdict() | AXES_DARK)
        rules = {"light": light, "dark": dark, "auto": f"{light}@media (prefers-color-scheme:dark){{{dark}}}"}
        size = f'width="{self.width:.0f}" height="{height:.0f}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width:.0f} {height:.0f}" '
            f'font-family="{FONT}">',
            f"<title>{_text(title)}</title><style>{rules[theme]}</style>",
            f'<rect {size} class="paper"/>',
            *self.elements,
            "</svg>\n",
        ]
        return "\n".join(lines)


def _rules(colors: dict[str, str]) -> str:
    """CSS: each class fills with its colour."""
    rules = [f".{name}{{fill:{color};stop-color:{color}}}" for name, color in {**colors, "grey": GREY}.items()]
    return "".join([*rules, f".line{{fill:none;stroke:{colors['ink']}}}"])


def _text(text: str) -> str:
    """Escapes a text. XML has no escape for control characters, which a file's name may have."""
    return escape(printable_lines(text))
