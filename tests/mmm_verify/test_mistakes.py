"""Every planted mistake is caught and said where it is; no right program is called wrong."""

import re
from operator import attrgetter
from unittest.mock import patch

import pytest

from mmm.torch_private.faults import MATRIX
from mmm_verify import run as verify_run
from mmm_verify import verify
from support.faults import skipped_by
from support.verify.cases import MISTAKES, RIGHT
from support.verify.models import BATCHES

of_one_device = attrgetter("model_fn", "batch_fn", "step_fn", "optimizer_fn", "layout", "batch_axes", "local_batch_fn")


@pytest.fixture(scope="module", autouse=True)
def each_reference_once():
    """What a model computes on one device does not depend on what makes it parallel."""
    made, compute = {}, verify_run.on_one_process

    def once(subject, timeout):
        key = of_one_device(subject)
        if key not in made:
            made[key] = compute(subject, timeout)
        return made[key]

    with patch.object(verify_run, "on_one_process", once):
        yield


def run(case):
    return verify(case.model, case.parallelize, BATCHES[case.model], mesh=case.mesh, **case.more)


# A Linear of these two gets a tensor that `SequenceParallel` has left sharded.
SHARDED = ("titan, nothing prepared", "titan, inputs said to be replicated")
OF_SHARDS = skipped_by("SequenceParallel", MATRIX)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=OF_SHARDS if case.name in SHARDED else ()) for case in RIGHT], ids=str
)
def test_right(case):
    verdict = run(case)
    assert verdict.same, f"{verdict}\n{verdict.details}"


@pytest.mark.parametrize(
    "case",
    [case if index % 8 == 0 else pytest.param(case, marks=pytest.mark.long) for index, case in enumerate(MISTAKES)],
    ids=str,
)
def test_mistake(case):
    verdict = run(case)
    assert verdict.exit_code == 1, str(verdict)
    message = str(verdict)[str(verdict).find("first difference:") :]
    assert re.search(case.says, message, re.DOTALL), message
