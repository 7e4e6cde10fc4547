"""The table of frameworks: every case can be run, and no "not the same" is in it without a control."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = Path(__file__).parents[2] / "docs/frameworks.md"
sys.path.insert(0, str(BENCHMARKS))
frameworks = importlib.import_module("frameworks")
# The cases of the benchmark by what its page calls them.
NAMES = {(case.framework, case.program): case for case in frameworks.CASES}
# One program that is right, and one that is wrong.
RIGHT = next(case for case in frameworks.CASES if case.expected == frameworks.SAME)
WRONG = next(case for case in frameworks.CASES if case.expected == frameworks.NOT_SAME)


def row(case, verdict):
    return frameworks.Row(case, verdict, 12.3, "gradients: 3.weight | differs", "")


@pytest.mark.parametrize("case", frameworks.CASES, ids=lambda case: f"{case.framework}: {case.program}")
def test_a_case_names_what_there_is(case):
    module, _, function = case.parallelize.partition(":")
    assert f"def {function}(" in (BENCHMARKS / "frameworks" / f"{module}.py").read_text()
    assert frameworks.version(case.framework)
    if case.expected == frameworks.NOT_SAME:
        assert NAMES[case.framework, case.control].expected == frameworks.SAME
        assert case.report


def test_names_are_unique():
    assert len(NAMES) == len(frameworks.CASES)


def test_a_row_needs_its_control():
    lines = {(row.case.framework, row.case.program): frameworks.line_of(row) for row in [row(WRONG, "not the same")]}
    assert WRONG.control in frameworks.problem(row(WRONG, "not the same"), lines)
    control = NAMES[WRONG.framework, WRONG.control]
    lines[WRONG.framework, WRONG.control] = frameworks.line_of(row(control, "not the same"))
    assert frameworks.problem(row(WRONG, "not the same"), lines)
    lines[WRONG.framework, WRONG.control] = frameworks.line_of(row(control, "same"))
    assert not frameworks.problem(row(WRONG, "not the same"), lines)


def test_another_verdict_than_expected_is_a_problem():
    assert "not comparable, and same was expected" in frameworks.problem(row(RIGHT, "not comparable"), {})
    assert "same, and not the same was expected" in frameworks.problem(row(WRONG, "same"), {})


def test_rows_that_are_not_run_stay():
    page = f"before\n{frameworks.BEGIN}\n{frameworks.END}\nafter"
    first = {(RIGHT.framework, RIGHT.program): frameworks.line_of(row(RIGHT, "same"))}
    page = frameworks.with_table(page, first)
    assert frameworks.lines_in(page) == first
    second = {(WRONG.framework, WRONG.program): frameworks.line_of(row(WRONG, "not the same"))}
    page = frameworks.with_table(page, frameworks.lines_in(page) | second)
    assert frameworks.lines_in(page) == first | second
    assert page.startswith("before\n")
    assert page.endswith("after")
    assert "1 of 2 programs are the same" in page


def test_the_page_has_every_case():
    lines = frameworks.lines_in(PAGE.read_text(encoding="utf-8"))
    assert lines.keys() == NAMES.keys()
    for name, line in lines.items():
        verdict = (
            f"| {frameworks.SAME} |" if NAMES[name].expected == frameworks.SAME else f"| **{NAMES[name].expected}** |"
        )
        assert verdict in line
