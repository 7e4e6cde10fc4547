"""Each link leads somewhere: in the repository, and on the site that `make docs` has built; lists begin after a blank
line; code that a page quotes is the code."""

import re
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from urllib.parse import unquote, urlsplit

import pytest

from support.pages import DOCS, PAGES, ROOT, SITE, anchors, name_of, prose

LINK = re.compile(r"""(?:\]\(|\b(?:href|src|srcset)=")([^)\s"]+)""")
ELSEWHERE = re.compile(r"https?://[\w.-]+\.[a-z]{2,}(:\d+)?(/[^\s<>]*)?|mailto:\S+@\S+")


def wrong_links(page):
    """The links of a page of the repository that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    return [link for link in LINK.findall(prose(text)) if not leads_somewhere(link, page)]


def leads_somewhere(link, page):
    if re.match(r"\w+:", link):
        return ELSEWHERE.fullmatch(link) is not None
    name, _, fragment = link.partition("#")
    file = page.parent / name if name else page
    if not file.exists():
        return False
    if not fragment:
        return True
    if file.suffix == ".md":
        return fragment in anchors(file.read_text(encoding="utf-8"))
    lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", fragment)
    return lines is not None and int(lines[2] or lines[1]) <= len(file.read_text(encoding="utf-8").splitlines())


class Parts(HTMLParser):
    """What a page of the site links to, loads, and has anchors for."""

    def __init__(self, text):
        super().__init__()
        self.links = set()
        self.loaded = set()
        self.anchors = {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "a" and attributes.get("href"):
            self.links.add(attributes["href"])
        if tag in ("script", "img", "iframe", "source", "object", "embed"):
            self.loaded |= {attributes[name].split()[0] for name in ("src", "srcset", "data") if attributes.get(name)}
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "modulepreload"):
            self.loaded.add(attributes["href"])


@cache
def parts(file):
    return Parts(file.read_text(encoding="utf-8"))


def wrong_on_site(page, site):
    """The links and files of a page of the site that are not there, or not the site's own."""
    wrong = [target for target in parts(page).loaded if urlsplit(target).scheme not in ("", "data")]
    for link in parts(page).links | parts(page).loaded:
        url = urlsplit(link)
        if url.scheme or url.netloc:
            if not ELSEWHERE.fullmatch(link) and url.scheme != "data":
                wrong.append(link)
            continue
        path = unquote(url.path)
        # As in 404.html, which is shown anywhere.
        start = site if path.startswith("/") else page.parent
        file = (start / path.lstrip("/")).resolve() if path else page
        if file.is_dir():
            file /= "index.html"
        if (
            not file.is_file()
            or not file.is_relative_to(site)
            or (file.suffix == ".html" and unquote(url.fragment) not in parts(file).anchors)
        ):
            wrong.append(link)
    return sorted(set(wrong))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_repository(page):
    assert wrong_links(page) == []


@pytest.mark.docs
def test_links_of_the_site():
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > len(PAGES)
    wrong = {str(page.relative_to(SITE)): result for page in pages if (result := wrong_on_site(page, SITE))}
    assert wrong == {}


@pytest.mark.docs
def test_no_style_fetches_anything():
    for style in SITE.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*", style.read_text(encoding="utf-8"))


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


# A block of code whose title is the path of a file of the repository.
BLOCK = re.compile(r'^```python title="(?P<path>[^"]+)"\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)
QUOTING = sorted(page for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text(encoding="utf-8")))
# Columns that a file may indent a block by.
DEEPEST = 24


def missing(code, source):
    """The first piece of a block that the source does not have after the pieces before it; None where it has all."""
    pieces = [piece for piece in re.split(r"^ *…\n", code, flags=re.MULTILINE) if piece]
    result = [_place(pieces, source.splitlines(), indent) for indent in range(0, DEEPEST + 1, 4)]
    furthest = max(result)
    if furthest == len(pieces):
        return None
    return pieces[furthest]


def _place(pieces, lines, indent):
    """How many pieces stand in the lines, one after the other."""
    position = 0
    for count, piece in enumerate(pieces):
        wanted = [" " * indent + line if line else line for line in piece.splitlines()]
        starts = (i for i in range(position, len(lines)) if lines[i : i + len(wanted)] == wanted)
        start = next(starts, None)
        if start is None:
            return count
        position = start + len(wanted)
    return len(pieces)


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_quotes_the_code(page):
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        source = ROOT / block["path"]
        assert source.is_file(), f"{page}: no such file: {block['path']}"
        piece = missing(block["code"], source.read_text(encoding="utf-8"))
        assert piece is None, f"{page}: {block['path']} does not have\n{piece}"
