"""Every model on every layout against plain PyTorch on one process: losses, and every gradient of the first step.

`make test` has a layout of each kind, 4 steps of it; `make test-long` the whole matrix of the proof on up to 4 ranks,
and what saves memory: a step, and one with what that has left.
"""

from contextlib import nullcontext
from functools import lru_cache
from unittest.mock import patch

import pytest

from mmm.parallel.pp.schedules import SCHEDULES
from mmm.parity import models, reference
from mmm.parity.layouts import MATRIX, ParityCase, matrix
from mmm.parity.reference import Training
from mmm.parity.report import evaluate
from mmm.parity.train import prepare, train

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_RANKS = 4
QUICK = {  # model: layouts, with what their sizes leave open
    "transformer": {
        "1": {"optimizers": ("sgd", "adamw")},
        "dp2": {"dtype": "fp32", "data": "packed"},
        "dp2·tp2": {"optimizers": ("sgd", "adamw")},
        "dp2·cp2": {},
        "cp2·tp2": {"cp_style": "ulysses", "data": "packed"},
        "cp4": {"cp_style": "usp", "ulysses": 2, "data": "packed"},
        "pp2·dp2": {"schedule": "ZBVZeroBubble"},
    },
    "moe": {"dp2·cp2·ep2": {}},
    "gpt": {"cp2·tp2": {"data": "packed"}},
    "gpt_dropout": {"tp2": {}},
    "plain_gpt": {"pp2": {}},
    "cnn": {"dp2·tp2": {"optimizers": ("sgd", "adamw")}, "dp2": {"data_parallel": "zero1"}},
    "vit": {"dp_replicate2·dp_shard2": {}},
}
CASES = [
    pytest.param(case, dtype, id=f"{model}-{layout}-{dtype}".replace("·", "."))
    for model, layouts in QUICK.items()
    for layout, fields in layouts.items()
    for dtype in [fields.pop("dtype", "fp64")]
    for case in [ParityCase(model=model, layout=layout, **{"optimizers": ("sgd",), **fields})]
]
CASES += [
    pytest.param(
        ParityCase(model=model, layout=layout, data_parallel="zero1", optimizers=("sgd",)),
        "fp64",
        id=f"{model}-{layout}-zero1-fp64".replace("·", "."),
    )
    for model, layout in (("moe", "dp2·cp2·ep2"), ("moe", "dp2·tp2·ep2"), ("plain_gpt", "pp2·dp2"))
]
CASES += [
    pytest.param(case, "fp64", id=f"{case} of the matrix", marks=pytest.mark.long)
    for model in MATRIX
    for case in matrix(model)
    if case.ranks <= MOST_RANKS
]
MEMORY = [  # what is computed again, or in pieces: models, layouts, what else
    *(("vit", "dp2·tp2", {"checkpointing": mode}) for mode in ("full", "selective")),
    *(("vit", "dp2", {"checkpointing": mode, "data_parallel": "zero2"}) for mode in ("full", "selective")),
    *(
        (model, "pp2", {"schedule": name, **fields})
        for name, schedule in SCHEDULES.items()
        for model, fields in (
            ("transformer", {"checkpointing": "full"}),
            ("transformer", {"tile": 3}),
            ("transformer", {"loss_chunks": 3}),
            ("moe", {"checkpointing": "full"}),
            *(() if schedule.splits else [("transformer", {"checkpointing": "selective"})]),
        )
    ),
]
CASES += [
    pytest.param(
        ParityCase(model=model, layout=layout, optimizers=("sgd",), **fields),
        "fp64",
        id=" ".join(map(str, (model, layout, *fields.values()))),
        marks=() if fields == {"schedule": "1F1B", "checkpointing": "selective"} else pytest.mark.long,
    )
    for model, layout, fields in MEMORY
]


@lru_cache
def reference_of(model: str, training: Training, optimizer: str) -> reference.Reference:
    return reference.train(models.find(model), training, optimizer)


def curves_of(rank, case, training, references):
    """In the process group that there is."""
    with patch("mmm.parity.train.process_group", lambda *_: nullcontext()):
        return train(rank, prepare(models.find(case.model), case, training), references, timeout=300.0)


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_same_as_plain_pytorch(run_on_ranks, request, case, dtype):
    steps = 2 if request.node.get_closest_marker("long") else 4
    training = Training(steps=steps, dtype=dtype, data=case.data)
    references = {optimizer: reference_of(case.model, training, optimizer) for optimizer in case.optimizers}
    ranks = run_on_ranks(curves_of, case.ranks, case, training, references)
    for optimizer, curves in zip(case.optimizers, zip(*ranks, strict=True), strict=True):
        row = evaluate(case, optimizer, training, references[optimizer], curves)
        assert row.passed, row.reason
