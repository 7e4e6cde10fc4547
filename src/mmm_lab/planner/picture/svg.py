"""A scene as SVG: text stays text, and under the theme ``auto`` the reader's own setting decides between light and
dark."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from mmm.outside import printable_lines
from mmm.palette import DARK, LIGHT, THEMES, Theme
from mmm_lab.planner.picture.scene import ROLES, Item, Line, Polygon, Rect, Scene

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def svg(scene: Scene, theme: str = "auto") -> str:
    """theme: ``auto``, ``light`` or ``dark``. The same scene gives the same bytes."""
    colors = LIGHT if theme == "auto" else THEMES[theme]
    width, height = _number(scene.width), _number(scene.height)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    lines = [f'{head}role="img" font-family="{FONT}">', f"<title>{_text(scene.title)}</title>"]
    lines.append(f"<desc>{_text(scene.description)}</desc>")
    if theme == "auto":
        lines.append(f"<style>@media (prefers-color-scheme: dark) {{{_rules(DARK)}}}</style>")
    lines.append(_item(Rect(0, 0, scene.width, scene.height, fill="paper"), colors))
    lines += [_item(item, colors) for item in scene.items]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(text: str) -> str:
    """XML has no escape for what is no character, such as one that somebody has in a file's name."""
    return escape(printable_lines(text))


def _rules(theme: Theme) -> str:
    fills = [f".mmm-{role}{{fill:{getattr(theme, role)}}}" for role in ROLES]
    return "".join(fills + [f".mmm-{role}-line{{stroke:{getattr(theme, role)}}}" for role in ROLES])


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _element(tag: str, item: Item, theme: Theme, places: Sequence[str], **more: object) -> str:
    """A shape. Its colours are attributes; the style of the theme ``auto`` goes by the classes."""
    fill, stroke = getattr(item, "fill", ""), getattr(item, "stroke", "")
    classes = [f"mmm-{fill}"] * (fill in ROLES) + [f"mmm-{stroke}-line"] * (stroke in ROLES)
    opacity = getattr(item, "opacity", 1.0)
    attributes = {place: getattr(item, place) for place in places}
    attributes |= {name.replace("_", "-"): value for name, value in more.items() if value}
    attributes |= {"class": " ".join(classes)} if classes else {}
    attributes["fill"] = getattr(theme, fill, fill) or "none"
    attributes |= {"stroke": getattr(theme, stroke, stroke)} if stroke else {}
    attributes |= {"opacity": opacity} if opacity < 1 else {}
    texts = [f'{name}="{_number(v) if isinstance(v, (int, float)) else v}"' for name, v in attributes.items()]
    return f"<{tag} {' '.join(texts)}"


def _item(item: Item, theme: Theme) -> str:
    if isinstance(item, Rect):
        line = item.line if item.stroke and item.line != 1 else 0
        dashes = "4 3" if item.dashed else ""
        places = ("x", "y", "width", "height")
        return _element("rect", item, theme, places, rx=item.radius, stroke_width=line, stroke_dasharray=dashes) + "/>"
    if isinstance(item, Polygon):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in item.points)
        return _element("polygon", item, theme, (), points=points) + "/>"
    if isinstance(item, Line):
        return _element("line", item, theme, ("x1", "y1", "x2", "y2"), stroke_width=item.line) + "/>"
    anchor = "" if item.anchor == "start" else item.anchor
    weight = "600" if item.bold else ""
    start = _element("text", item, theme, ("x", "y"), font_size=item.size, text_anchor=anchor, font_weight=weight)
    return f"{start}>{_text(item.text)}</text>"
