"""Code that a page quotes is the code: a block ```` ```python title="src/…" ```` stands in that file, line for line.

Such a block may be indented less than the file. A line `…` leaves lines out.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r'^```python title="(?P<path>[^"]+)"\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if BLOCK.search(page.read_text(encoding="utf-8")))
DEEPEST = 24  # columns that a file may indent a block by


def missing(code, source):
    """The first piece of a block that the source does not have after the pieces before it; None where it has all."""
    pieces = [piece for piece in re.split(r"^ *…\n", code, flags=re.MULTILINE) if piece]
    found = [_place(pieces, source.splitlines(), indent) for indent in range(0, DEEPEST + 1, 4)]
    furthest = max(found)
    return None if furthest == len(pieces) else pieces[furthest]


def _place(pieces, lines, indent):
    """How many pieces stand in the lines, one after the other."""
    at = 0
    for count, piece in enumerate(pieces):
        wanted = [" " * indent + line if line else line for line in piece.splitlines()]
        starts = (i for i in range(at, len(lines)) if lines[i : i + len(wanted)] == wanted)
        start = next(starts, None)
        if start is None:
            return count
        at = start + len(wanted)
    return len(pieces)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_quotes_the_code(page):
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        source = ROOT / block["path"]
        assert source.is_file(), f"{page}: no such file: {block['path']}"
        piece = missing(block["code"], source.read_text(encoding="utf-8"))
        assert piece is None, f"{page}: {block['path']} does not have\n{piece}"
