"""What the three lines of the README print, as docs/three-lines.md has it: its first 20 lines, and its last 18.

MMM_WRITE_DOCS=1 writes the page anew, and the README's excerpts of it.
"""

import pytest

from support.console import GAP, check_page, commands_of
from support.pages import DOCS, ROOT, blocks

PAGE, README = DOCS / "three-lines.md", ROOT / "README.md"
LINES = (
    "launch python3 -m mmm.examples.fsdp_tp --tpsize 4",
    "launch python3 -m mmm.trainer.vit --max_iters 10",
    "launch python3 -m mmm.examples.fsdp --epochs 2",
)
FIRST, LAST = 20, 18


def shown_in(page, language):
    """Line: the block of a page that begins with it, and what it shows."""
    found = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == language and block.text.startswith("$ launch"):
            (shown,) = commands_of(block.text)
            found[shown.command] = (block, shown)
    return found


@pytest.mark.parametrize("line", LINES)
def test_the_page_has_the_first_lines_and_the_last(line):
    _, shown = shown_in(PAGE, "console")[line]
    assert shown.lines.index(GAP) == FIRST
    assert len(shown.lines) == FIRST + 1 + LAST


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_what_a_line_prints_is_what_the_page_says(line, tmp_path):
    assert "\n".join(check_page(PAGE, tmp_path, numbers=False, only=line)) == ""
