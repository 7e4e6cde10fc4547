"""Every planted mistake is caught and said where it is; no right program is called wrong."""

import re

import pytest

from mmm.verify import verify
from support.verify.cases import MISTAKES, RIGHT
from support.verify.models import BATCHES


def run(case):
    return verify(case.model, case.parallelize, BATCHES[case.model], mesh=case.mesh, **case.more)


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_right(case):
    verdict = run(case)
    assert verdict.same, f"{verdict}\n{verdict.details}"


@pytest.mark.parametrize(
    "case",
    [case if number % 8 == 0 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(MISTAKES)],
    ids=str,
)
def test_mistake(case):
    verdict = run(case)
    assert verdict.exit_code == 1, str(verdict)
    said = str(verdict)[str(verdict).find("they part at") :]
    assert re.search(case.says, said, re.DOTALL), said
