"""The list of mistakes fits the code: `make mutants` plants them."""

import ast

import pytest

from mutants.__main__ import HEAD
from mutants.mistakes import PACKAGE, ROOT, TESTS, Mistake, all_mistakes

LEAST = 60


@pytest.mark.parametrize("mistake", all_mistakes(), ids=lambda mistake: mistake.name)
def test_it_can_be_planted_and_its_tests_exist(mistake):
    text = (ROOT / PACKAGE / mistake.file).read_text("utf-8")
    ast.parse(mistake.planted(text))
    for test in mistake.tests.split():
        file, _, name = test.partition("::")
        path = ROOT / TESTS / file
        assert path.exists(), test
        assert f"def {name.partition('[')[0]}(" in (path.read_text("utf-8") if name else "def ("), test


def test_a_list_that_has_rotten_is_seen():
    mistake = Mistake("room", "name", "file", "before", "after", "tests", "seen")
    assert mistake.planted("a before b") == "a after b"
    for text in ("a b", "before before"):
        with pytest.raises(ValueError, match="not once"):
            mistake.planted(text)


def test_each_has_its_row_in_the_page():
    names = [mistake.name for mistake in all_mistakes()]
    assert len(names) >= LEAST
    assert len(set(names)) == len(names)
    table = (ROOT / "docs" / "testing.md").read_text("utf-8").partition(HEAD)[2]
    assert [line.split(" | ")[2].strip("`") for line in table.splitlines()] == names
