"""The site as its readers open it: from a file, and on the narrow screen of a telephone."""

import pytest

pytestmark = pytest.mark.docs

# Types into the search field, and again until something has been found.
SEARCH = """
const toggle = document.getElementById("__search");
const input = document.querySelector("[data-md-component=search-query]");
toggle.checked = true;
toggle.dispatchEvent(new Event("change", { bubbles: true }));
setInterval(() => {
  const links = [...document.querySelectorAll(".md-search-result__link")].map((link) => link.href);
  leave(links);
  if (links.length) return;
  input.focus();
  input.value = input.value === "ulysses" ? "ulysses " : "ulysses";
  input.dispatchEvent(new Event("keyup", { bubbles: true }));
}, 500);
"""
# Of each column of words: what begins it, and how many letters wide it is.
COLUMNS = """
const columns = [];
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  for (const [place, head] of [...table.rows[0].cells].entries()) {
    const texts = [...table.rows].map((row) => row.cells[place]?.textContent ?? "");
    const words = texts.filter((text) => /[a-z]{5}/.test(text));
    const style = getComputedStyle(head);
    const width = head.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (words.length) columns.push([words[0].slice(0, 30), width / (parseFloat(style.fontSize) / 2)]);
  }
}
leave(columns);
"""


def test_the_search_works_from_a_file(opened):
    links = opened("index.html", SEARCH)
    assert links, "nothing found"
    assert any("context-parallel.html" in link for link in links), links


@pytest.mark.parametrize("name", ["mistakes.html", "reference/flags.html"])
def test_no_column_of_words_is_a_letter_wide(opened, name):
    columns = opened(name, COLUMNS, width=400)
    assert columns
    narrow = [(text, round(letters, 1)) for text, letters in columns if letters < 5]
    assert not narrow
