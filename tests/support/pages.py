"""The pages of the documentation, and the fenced blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = ROOT / "site"
# All that a reader may open.
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *(?P=ticks)`*$", re.DOTALL | re.M
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        line: of the page, at which its text begins, from 1.
        span: of its text in the page's.
    """

    language: str
    text: str
    line: int
    span: tuple[int, int]


def name_of(page):
    """A page's path, for the names of tests."""
    return str(page.relative_to(ROOT))


def blocks(text):
    """The fenced blocks of a page's text."""
    return [
        Block(fence["language"], fence["text"], text.count("\n", 0, fence.start("text")) + 1, fence.span("text"))
        for fence in FENCE.finditer(text)
    ]


def program_with(page, phrase):
    """The one block of a page in docs/ that has this phrase."""
    (program,) = [block.text for block in blocks((DOCS / page).read_text()) if phrase in block.text]
    return program


def prose(text):
    """A page's text without code."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", FENCE.sub("", text), flags=re.DOTALL)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    names = []
    for head in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        plain_head = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head)
        anchor = re.sub(r"[^\w\- ]", "", plain_head).strip().replace(" ", "-").lower()
        names.append(anchor if anchor not in names else f"{anchor}-{sum(entry.startswith(anchor) for entry in names)}")
    return names
