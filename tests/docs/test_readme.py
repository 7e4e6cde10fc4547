"""The README is short, and what it shows of the three lines is what docs/three-lines.md shows, which is run."""

import os

import pytest

from support.console import WRITE, anew, commands_of, difference
from support.pages import DOCS, ROOT, blocks

README, PAGE = ROOT / "README.md", DOCS / "three-lines.md"


def shown_in(page, language):
    """Block of a page that shows a terminal: its command and what it shows."""
    found = [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == language]
    return {block: commands_of(block.text)[0] for block in found if block.text.startswith("$ launch")}


def test_it_shows_the_three_lines():
    printed = {shown.command: shown.lines for shown in shown_in(PAGE, "console").values()}
    text, wrong = README.read_text(encoding="utf-8"), []
    excerpts = shown_in(README, "")
    assert sorted(shown.command for shown in excerpts.values()) == sorted(printed)
    for block, shown in reversed(excerpts.items()):
        wrong.append(difference(shown, printed[shown.command], 0, numbers=False))
        lines = [f"$ {shown.command}", *anew(shown, printed[shown.command])]
        text = text[: block.span[0]] + "".join(f"{line}\n" for line in lines) + text[block.span[1] :]
    if os.environ.get(WRITE):
        README.write_text(text, encoding="utf-8")
    elif any(wrong):
        pytest.fail("\n\n".join(wrong))
