"""A list of a page begins after a blank line: else Python's Markdown takes its first item for the end of the paragraph
before."""

import re
from itertools import pairwise

import pytest

from support.pages import PAGES, name_of, prose

ITEM = re.compile(r" *(?:\d+\.|[-*]) ")


def glued(text):
    """The items that follow a line of a paragraph."""
    lines = ["", *prose(text).splitlines()]
    return [
        line
        for before, line in pairwise(lines)
        if ITEM.match(line) and before.strip() and not ITEM.match(before) and not before.startswith("  ")
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_list_begins_after_a_blank_line(page):
    assert glued(page.read_text(encoding="utf-8")) == []
