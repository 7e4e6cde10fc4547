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
    "sharded_optimizer_keeps_old_weights",
    "unequal_tokens_over_ranks",
}


def rows():
    """Each bug in both types; what is not quick is in `make test-long`."""
    for name in BUGS:
        for dtype in ("float64", "float32"):
            quick = name in QUICK and dtype == "float64"
            yield pytest.param(name, dtype, marks=[] if quick else pytest.mark.long)


@pytest.mark.parametrize(("name", "dtype"), rows())
def test_a_known_bug(name, dtype):
    bug = BUGS[name]
    right = bug.verify(bug.right, dtype=dtype)
    assert right.same, f"{right}\n{right.details}"

    wrong = bug.verify(bug.wrong, dtype=dtype)
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
