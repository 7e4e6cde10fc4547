"""What the three lines of the README print, as docs/three-lines.md has it: its first 10 lines, and its last 21. The
README shows excerpts of that. MMM_WRITE_DOCS=1 writes both anew."""

import os

import pytest

from support.console import GAP, WRITE, anew, check_page, commands_of, difference
from support.pages import DOCS, ROOT, blocks

PAGE = DOCS / "three-lines.md"
README = ROOT / "README.md"
LINES = (
    "launch python3 -m mmm.examples.fsdp_tp --tpsize 4",
    "launch python3 -m mmm.trainer.vit --max_iters 10",
    "launch python3 -m mmm.examples.fsdp --epochs 2",
)
# Rows of steps are not among them: how many columns fit in a row depends on the seconds in it.
FIRST, LAST = 10, 21


def shown_in(page, language):
    """Line: the block of a page that begins with it, and what it shows."""
    results = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == language and block.text.startswith("$ launch"):
            (shown,) = commands_of(block.text)
            results[shown.command] = (block, shown)
    return results


@pytest.mark.parametrize("line", LINES)
def test_the_page_has_the_first_lines_and_the_last(line):
    _, shown = shown_in(PAGE, "console")[line]
    assert shown.lines.index(GAP) == FIRST
    assert len(shown.lines) == FIRST + 1 + LAST


def test_the_readme_shows_the_page_s():
    printed = {line: shown.lines for line, (_, shown) in shown_in(PAGE, "console").items()}
    excerpts = shown_in(README, "")
    text = README.read_text(encoding="utf-8")
    wrong = []
    assert sorted(excerpts) == sorted(printed)
    for line, (block, shown) in reversed(excerpts.items()):
        wrong.append(difference(shown, printed[line], 0, compare_numbers=False))
        lines = [f"$ {line}", *anew(shown, printed[line])]
        begin, end = block.span
        shown = "".join(f"{line}\n" for line in lines)
        text = text[:begin] + shown + text[end:]
    if os.environ.get(WRITE):
        README.write_text(text, encoding="utf-8")
    elif any(wrong):
        pytest.fail("\n\n".join(wrong))


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_what_a_line_prints_is_what_the_page_says(line, tmp_path):
    """The first one makes 8 of its 50 steps, of three seconds each: words are compared, and no numbers."""
    page = PAGE
    if line == LINES[0] and not os.environ.get(WRITE):
        page = tmp_path / PAGE.name
        page.write_text(PAGE.read_text(encoding="utf-8").replace(f"$ {line}\n", f"$ {line} --max_iters 8\n"))
        line += " --max_iters 8"
    wrong = check_page(page, tmp_path, compare_numbers=False, only=line)
    assert wrong == [], "\n".join(wrong)
