"""Every model on every layout against plain PyTorch on one process: losses, and every gradient of the first step.

`make test` has a layout of each kind, 4 steps of it; `make test-long` the whole matrix of the proof on up to 4 ranks,
and what saves memory: a step, and one with what that has left.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from unittest.mock import patch

import pytest

from mmm.parallel.mesh import build_mesh
from mmm.parallel.pp.schedules import SCHEDULES
from mmm_lab.parity import models, reference
from mmm_lab.parity.layouts import ParityCase, matrix
from mmm_lab.parity.optimizers import make_optimizer
from mmm_lab.parity.parity_model import ParityModel
from mmm_lab.parity.reference import Training
from mmm_lab.parity.report import evaluate
from mmm_lab.parity.train import prepare, train
from mmm_verify.ranks import RanksFailed
from support.clock import PATIENCE

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
    "lora": {"dp2·tp2": {}, "pp2": {"schedule": "ZBVZeroBubble"}},
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
    for model in models.NAMES
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


LAYERS = {
    1: 2,
    2: 4,
}  # at most, by the size of pp: a stage of two on each rank has a layer, and there are parts to spare


def parity_of(name: str, pp: int) -> ParityModel:
    """A model of the proof, with fewer layers where they are alike and the pipeline needs no more."""
    parity = models.find(name)

    def with_fewer():
        model = parity.model()
        if getattr(getattr(model, "config", None), "n_layers", 0) <= LAYERS.get(pp, 6):
            return model
        return type(model)(replace(model.config, n_layers=LAYERS[pp]))

    return replace(parity, model=with_fewer)


@lru_cache
def reference_of(model: str, pp: int, training: Training, optimizer: str) -> reference.Reference:
    return reference.train(parity_of(model, pp), training, optimizer, make_optimizer)


def curves_of(rank, cases, references):
    """Of each case and its training, in the process group that there is. They have a layout in common, and so its mesh:
    DTensor has found only once how an operator goes on it."""
    with (
        patch("mmm_lab.parity.train.process_group", lambda *_: nullcontext()),
        patch("mmm_lab.parity.train.build_mesh", cache(build_mesh)),
    ):
        return [
            train(rank, prepare(parity_of(case.model, pp_of(case)), case, training), expected, timeout=300.0)
            for (case, training), expected in zip(cases, references, strict=True)
        ]


def pp_of(case):
    return case.sizes.get("pp", 1)


def training_of(item):
    """Of a test's item."""
    case, dtype = (item.callspec.params[name] for name in ("case", "dtype"))
    return Training(steps=2 if item.get_closest_marker("long") else 4, dtype=dtype, data=case.data)


def train_on_ranks(run_on_ranks, items):
    """Of each item, the curves of all ranks."""
    cases = [(item.callspec.params["case"], training_of(item)) for item in items]
    references = [
        {optimizer: reference_of(case.model, pp_of(case), training, optimizer) for optimizer in case.optimizers}
        for case, training in cases
    ]
    ranks = run_on_ranks(curves_of, cases[0][0].ranks, cases, references, timeout=PATIENCE)
    return zip(*ranks, strict=True)


def layout_of(item):
    case = item.callspec.params["case"]
    return case.model, case.layout


TRAINED = {}


@pytest.fixture
def curves(run_on_ranks, request):
    """Of each rank, for the test's case. All cases of a model on one layout are trained in one call: most of a call is
    its start."""
    own = request.node
    if own.nodeid not in TRAINED:
        group = [item for item in request.session.items if item.path == own.path and layout_of(item) == layout_of(own)]
        try:
            TRAINED.update(zip((item.nodeid for item in group), train_on_ranks(run_on_ranks, group), strict=True))
        except RanksFailed:  # one case; the others are not to fail with it
            TRAINED.update({item.nodeid: None for item in group})
    found = TRAINED.pop(own.nodeid)
    return next(train_on_ranks(run_on_ranks, [own])) if found is None else found


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_same_as_plain_pytorch(curves, request, case, dtype):
    training = training_of(request.node)
    for optimizer, by_rank in zip(case.optimizers, zip(*curves, strict=True), strict=True):
        expected = reference_of(case.model, pp_of(case), training, optimizer)
        row = evaluate(case, optimizer, training, expected, by_rank)
        assert row.passed, row.reason
