"""A list of a page is a list on the site that `make docs` has built.

Python's Markdown begins a list only after a blank line: without one its first item is the end of the paragraph before.
"""

import re
from html.parser import HTMLParser

import pytest

from support.pages import DOCS, PAGES, ROOT, SITE, name_of, prose

NUMBERED = re.compile(r"^ *\d+\. ", re.MULTILINE)
BULLETED = re.compile(r"^ *[-*] |<li>", re.MULTILINE)
AT_THE_ROOT = {ROOT / "README.md": "index.html", ROOT / "CHANGELOG.md": "changelog.html"}


class Items(HTMLParser):
    """How many items the numbered (ol) and the bulleted (ul) lists of a page's article have."""

    def __init__(self, text):
        super().__init__()
        self.count = {"ol": 0, "ul": 0}
        self.open = []
        self.feed(text[text.index("<article") : text.index("</article>")])

    def handle_starttag(self, tag, attrs):
        if tag in self.count:
            self.open.append(tag)
        if tag == "li":
            self.count[self.open[-1]] += 1

    def handle_endtag(self, tag):
        if tag in self.count:
            self.open.pop()


def items_in_source(text):
    text = prose(text)
    return {"ol": len(NUMBERED.findall(text)), "ul": len(BULLETED.findall(text))}


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_item_is_an_item_on_the_site(page):
    file = AT_THE_ROOT.get(page) or page.relative_to(DOCS).with_suffix(".html")
    on_site = Items((SITE / file).read_text(encoding="utf-8")).count
    assert on_site == items_in_source(page.read_text(encoding="utf-8"))


def test_an_item_without_a_blank_line_before_it():
    markdown = pytest.importorskip("markdown")
    text = "1. One.\n\n    Its second paragraph.\n2. Two.\n"
    glued = Items(f"<article>{markdown.markdown(text)}</article>")
    assert items_in_source(text)["ol"] == 2
    assert glued.count["ol"] == 1
