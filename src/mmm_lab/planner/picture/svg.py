"""Writes a scene as SVG. Text stays text; under the theme ``auto`` the reader's setting chooses light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from mmm.outside import printable_lines
from mmm.palette import DARK, LIGHT, THEMES, Theme
from mmm_lab.planner.picture.scene import ROLES, Item, Line, Polygon, Rect, Scene

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def svg(scene: Scene, theme: str = "auto") -> str:
    """The scene as an SVG file. The same scene always gives the same bytes.

    Args:
        theme: ``auto``, ``light`` or ``dark``.
    """
    colors = LIGHT if theme == "auto" else THEMES[theme]
    width = _number(scene.width)
    height = _number(scene.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="{FONT}">',
        f"<title>{_text(scene.title)}</title>",
        f"<desc>{_text(scene.description)}</desc>",
    ]
    if theme == "auto":
        # The elements have the colours of the light theme, and classes that this rule knows.
        lines.append(f"<style>@media (prefers-color-scheme: dark) {{{_rules(DARK)}}}</style>")
    lines.append(_item(Rect(0, 0, scene.width, scene.height, fill="paper"), colors))
    lines += [_item(item, colors) for item in scene.items]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(text: str) -> str:
    """Escapes a text. XML has no escape for control characters, which a file's name may have."""
    return escape(printable_lines(text))


def _rules(theme: Theme) -> str:
    """CSS rules for the colours of a theme."""
    fills = [f".mmm-{role}{{fill:{getattr(theme, role)}}}" for role in ROLES]
    return "".join(fills + [f".mmm-{role}-line{{stroke:{getattr(theme, role)}}}" for role in ROLES])


def _number(value: float) -> str:
    """A number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _element(tag: str, item: Item, theme: Theme, fields: Sequence[str], **more: object) -> str:
    """The beginning of an element, without its ``>``. Its colours are attributes, and classes for the style.

    Args:
        fields: fields of the item that are attributes of the same name.
        more: other attributes, with ``_`` for ``-``; those that are empty or 0 are left out.
    """
    fill = getattr(item, "fill", "")
    stroke = getattr(item, "stroke", "")
    opacity = getattr(item, "opacity", 1.0)
    attributes = {field: getattr(item, field) for field in fields}
    for name, value in more.items():
        if value:
            attributes[name.replace("_", "-")] = value
    classes = []
    if fill in ROLES:
        classes.append(f"mmm-{fill}")
    if stroke in ROLES:
        classes.append(f"mmm-{stroke}-line")
    if classes:
        attributes["class"] = " ".join(classes)
    # SVG fills a shape with black unless it says ``none``.
    attributes["fill"] = getattr(theme, fill, fill) or "none"
    if stroke:
        attributes["stroke"] = getattr(theme, stroke, stroke)
    if opacity < 1:
        attributes["opacity"] = opacity
    text = f"<{tag}"
    for name, value in attributes.items():
        text += f' {name}="{value if isinstance(value, str) else _number(value)}"'
    return text


def _item(item: Item, theme: Theme) -> str:
    """The element of an item."""
    if isinstance(item, Rect):
        # 1 is the default of SVG.
        line = item.line if item.stroke and item.line != 1 else 0
        dashes = ""
        if item.dashed:
            dashes = "4 3"
        fields = ("x", "y", "width", "height")
        return (
            _element(
                "rect",
                item,
                theme,
                fields,
                rx=item.radius,
                stroke_width=line,
                stroke_dasharray=dashes,
            )
            + "/>"
        )
    if isinstance(item, Polygon):
        # Coordinates with two decimals keep the file small, and the same on every machine.
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in item.points)
        return _element("polygon", item, theme, (), points=points) + "/>"
    if isinstance(item, Line):
        return (
            _element(
                "line",
                item,
                theme,
                ("x1", "y1", "x2", "y2"),
                stroke_width=item.line,
            )
            + "/>"
        )
    anchor = item.anchor
    if item.anchor == "start":
        anchor = ""
    weight = ""
    if item.bold:
        weight = "600"
    start = _element(
        "text",
        item,
        theme,
        ("x", "y"),
        font_size=item.size,
        text_anchor=anchor,
        font_weight=weight,
    )
    return f"{start}>{_text(item.text)}</text>"
