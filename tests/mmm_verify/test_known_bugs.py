"""Public bugs, a file of `known_bugs` each: the right program is "same", and the wrong one is caught and named."""

import re

import pytest

from support.known_bugs import first_named, known_bugs

BUGS = known_bugs()
# One of each stage of a verdict; the others are in `make test-long`.
QUICK = {
    "bypassed_wrapper",
    "clipping_by_the_norm_of_own_experts",
    "norm_of_heads_not_summed",
    "own_weights_on_each_rank",
    "positions_by_the_wrong_group",
    "tied_copies_by_two_optimizers",
    "unequal_tokens_over_ranks",
}


def by_speed(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", by_speed(BUGS))
def test_a_known_bug(name):
    bug = BUGS[name]
    right = bug.verify(bug.right)
    assert right.same, f"{right}\n{right.details}"

    wrong = bug.verify(bug.wrong)
    assert wrong.result == bug.result, f"{wrong}\n{wrong.details}"
    assert bug.first in first_named(wrong), wrong
    relation = "\n".join(map(str, wrong.findings)) or wrong.reason
    assert re.search(bug.says, relation), wrong
    if bug.rank is not None:
        assert wrong.findings[0].rank == bug.rank, wrong


def test_enough_kinds_are_known():
    """And most are named by the tensor or module where the mistake is."""
    assert BUGS.keys() >= QUICK
    assert len(BUGS) >= 30
    assert sum(bug.is_origin for bug in BUGS.values()) >= 24
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for bug in BUGS.values() for report in bug.reports)
