"""A scene as SVG: text stays text, and under the theme ``auto`` the reader's own setting decides between light and
dark."""

from __future__ import annotations

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


def _paint(theme: Theme, fill: str, stroke: str = "", opacity: float = 1.0) -> str:
    """Attributes; the style of the theme ``auto`` goes by the classes."""
    names = [f"mmm-{fill}"] if fill in ROLES else []
    names += [f"mmm-{stroke}-line"] if stroke in ROLES else []
    found = f' class="{" ".join(names)}"' if names else ""
    found += f' fill="{getattr(theme, fill, fill) or "none"}"'
    found += f' stroke="{getattr(theme, stroke, stroke)}"' if stroke else ""
    return found + (f' opacity="{_number(opacity)}"' if opacity < 1 else "")


def _item(item: Item, theme: Theme) -> str:
    number = _number
    if isinstance(item, Rect):
        place = f'x="{number(item.x)}" y="{number(item.y)}" width="{number(item.width)}" height="{number(item.height)}"'
        shape = f' rx="{number(item.radius)}"' if item.radius else ""
        shape += f' stroke-width="{number(item.line)}"' if item.stroke and item.line != 1 else ""
        shape += ' stroke-dasharray="4 3"' if item.dashed else ""
        return f"<rect {place}{shape}{_paint(theme, item.fill, item.stroke, item.opacity)}/>"
    if isinstance(item, Polygon):
        points = " ".join(f"{number(x)},{number(y)}" for x, y in item.points)
        return f'<polygon points="{points}"{_paint(theme, item.fill, opacity=item.opacity)}/>'
    if isinstance(item, Line):
        ends = f'x1="{number(item.x1)}" y1="{number(item.y1)}" x2="{number(item.x2)}" y2="{number(item.y2)}"'
        return f'<line {ends} stroke-width="{number(item.line)}"{_paint(theme, "", item.stroke)}/>'
    anchor = "" if item.anchor == "start" else f' text-anchor="{item.anchor}"'
    bold = ' font-weight="600"' if item.bold else ""
    where = f'x="{number(item.x)}" y="{number(item.y)}" font-size="{number(item.size)}"'
    return f"<text {where}{anchor}{bold}{_paint(theme, item.fill, opacity=item.opacity)}>{_text(item.text)}</text>"
