"""The list of mistakes fits the code: `make mutants` plants them."""

import ast
import re
import textwrap
from collections import Counter

import pytest

from mutants.mistakes import TESTS, all_mistakes
from mutants.planting import ROOT, planted

PAGE = ROOT / "docs" / "testing.md"


@pytest.mark.parametrize("mistake", all_mistakes(), ids=lambda mistake: mistake.name)
def test_it_can_be_planted_and_its_tests_exist(mistake):
    _, text = mistake.planted()
    ast.parse(text)
    assert mistake.before != mistake.after
    for test in mistake.tests.split():
        file, _, name = test.partition("::")
        path = ROOT / TESTS / file
        assert path.exists(), test
        assert f"def {name.partition('[')[0]}(" in (path.read_text("utf-8") if name else "def ("), test


MODULE = """
class Sum:
    def of(self, numbers):
        if not numbers:  # nothing to add
            return 0
        total = sum(
            numbers, start=0)
        log(total)
        return total

LIMITS = {"low": 1, "high": 2}
"""


@pytest.mark.parametrize(
    ("function", "before", "after", "expected"),
    [
        ("Sum.of", "sum(numbers, start=0)", "0", "total = 0"),
        ("Sum.of", "log(total)", "", "pass"),
        ("Sum.of", "log(total)\nreturn total", "return log(total)", "return log(total)"),
        ("Sum.of", "if not numbers:\n    ...", "if numbers:\n    ...", "if numbers:\n    return 0"),
        ("LIMITS", "{'high': 2}", "{'high': 3}", "{'high': 3, 'low': 1}"),
        ("LIMITS", "1", "-1", "{'low': -1, 'high': 2}"),
    ],
)
def test_planting_by_the_syntax_tree(tmp_path, function, before, after, expected):
    path = tmp_path / "src" / "house" / "sums.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODULE)
    file, text = planted(function, before, after, root=tmp_path)
    assert file == path
    assert textwrap.dedent(expected).splitlines()[0] in text
    assert len(ast.parse(text).body) == 2


@pytest.mark.parametrize(
    ("function", "before", "module"),
    [
        # Several times
        ("Sum.of", "total", ""),
        # not there
        ("Sum.of", "product(numbers)", ""),
        ("Sum.product", "total", ""),
        ("Sum.of", "log(total)", "products"),
    ],
)
def test_what_is_not_there_once_is_seen(tmp_path, function, before, module):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "sums.py").write_text(MODULE)
    with pytest.raises(ValueError, match="times, not once"):
        planted(function, before, "0", module, root=tmp_path)


def test_names_are_unique_and_the_page_counts_them():
    """docs/testing.md has a row a room: its name, the number of its mistakes, and one of them."""
    mistakes = all_mistakes()
    names = [mistake.name for mistake in mistakes]
    assert len(set(names)) == len(names)
    counts = Counter(mistake.room for mistake in mistakes)
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {room: int(count) for room, count, _ in rows} == counts
    sentences = {(mistake.room, mistake.seen) for mistake in mistakes}
    for room, _, example in rows:
        assert (room, example) in sentences, example
