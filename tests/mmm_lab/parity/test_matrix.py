"""Every model on every layout against plain PyTorch on one process: weights, losses and every gradient of two steps.

`make test` has a layout of each kind; `make test-long` the whole matrix of the proof on up to 4 ranks, and what saves
memory: a step, and one with what that has left.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from unittest.mock import patch

import pytest
import torch

from mmm.parallel.mesh import build_mesh
from mmm.parallel.pp.schedules import SCHEDULES
from mmm_lab.parity import models
from mmm_lab.parity.layouts import MATRIX, ParityCase, matrix
from mmm_lab.parity.parity_model import ParityModel
from mmm_lab.parity.subject import make_subject_of, prepare
from mmm_verify.evaluate import evaluate
from mmm_verify.plain import make_batch
from mmm_verify.rank import run_rank
from mmm_verify.ranks import RanksFailed
from mmm_verify.repeat import compute_reference
from mmm_verify.seen import look
from support import parity_models
from support.clock import PATIENCE

MOST_RANKS = 4
OWN = f"{parity_models.__name__}."

# Model → layouts, with what their sizes leave open.
QUICK = {
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
    f"{OWN}plain_gpt": {"pp2": {}},
    f"{OWN}lora": {"dp2·tp2": {}, "pp2": {"schedule": "ZBVZeroBubble"}},
    f"{OWN}unet": {"cp3": {"cp_style": "space"}},
    "cnn": {"dp2·tp2": {"optimizers": ("sgd", "adamw")}, "dp2": {"data_parallel": "zero1"}},
    "vit": {"dp_replicate2·dp_shard2": {}},
    "swin": {"cp2·tp2": {"cp_style": "space"}},
}
# In the type in which most are trained.
FLOAT32 = {"swin": "cp2·tp2", f"{OWN}unet": "dp2·cp2", f"{OWN}fno": "cp2"}
ZERO = [("moe", "dp2·cp2·ep2"), ("moe", "dp2·tp2·ep2"), (f"{OWN}plain_gpt", "pp2·dp2")]

# What is computed again, or in pieces: models, layouts, what else.
MEMORY = [
    *(("vit", "dp2·tp2", {"checkpointing": mode}) for mode in ("full", "selective")),
    *(("vit", "dp2", {"checkpointing": mode, "data_parallel": "zero2"}) for mode in ("full", "selective")),
]
for schedule_name, schedule in SCHEDULES.items():
    MEMORY += [
        ("transformer", "pp2", {"schedule": schedule_name, "checkpointing": "full"}),
        ("transformer", "pp2", {"schedule": schedule_name, "loss_chunks": 3}),
        ("moe", "pp2", {"schedule": schedule_name, "checkpointing": "full"}),
    ]
    # A schedule that splits backward does not go with it.
    if not schedule.splits:
        MEMORY.append(("transformer", "pp2", {"schedule": schedule_name, "checkpointing": "selective"}))
QUICK_MEMORY = {"schedule": "1F1B", "checkpointing": "selective"}


def param(case, dtype="fp64", name="", long=False):
    """A case of the table, called by its model and layout, or by `name`."""
    name = name or f"{case.model}-{case.layout}-{dtype}"
    return pytest.param(
        case,
        dtype,
        id=name.removeprefix(OWN).replace("·", "."),
        marks=[pytest.mark.long] if long else [],
    )


def all_cases():
    for model, layouts in QUICK.items():
        for layout, changes in layouts.items():
            fields = {"optimizers": ("sgd",), **changes}
            dtype = fields.pop("dtype", "fp64")
            yield param(ParityCase(model=model, layout=layout, **fields), dtype)
    for model, layout in FLOAT32.items():
        case = ParityCase(model=model, layout=layout, cp_style="space", optimizers=("sgd",))
        yield param(case, "fp32", long=True)
    for model, layout in ZERO:
        case = ParityCase(model=model, layout=layout, data_parallel="zero1", optimizers=("sgd",))
        yield param(case, name=f"{model}-{layout}-zero1-fp64")
    for names, path in ((models.NAMES, MATRIX), (parity_models.NAMES, parity_models.MATRIX)):
        for model in names:
            for case in matrix(model, path):
                if case.ranks <= MOST_RANKS:
                    yield param(case, name=f"{case} of the matrix", long=True)
    for model, layout, fields in MEMORY:
        case = ParityCase(model=model, layout=layout, optimizers=("sgd",), **fields)
        title = " ".join(map(str, (model, layout, *fields.values())))
        yield param(case, name=title, long=fields != QUICK_MEMORY)


# Layers at most, by the size of pp: a stage of two on each rank has a layer, and there are parts to spare.
LAYERS = {1: 2, 2: 4}


def parity_of(case: ParityCase) -> ParityModel:
    """A model of the proof, with fewer layers where they are alike and the pipeline needs no more."""
    parity = models.find(case.model)
    most = LAYERS.get(pp_of(case), 6)

    def with_fewer():
        model = parity.model()
        if getattr(getattr(model, "config", None), "n_layers", 0) <= most:
            return model
        return type(model)(replace(model.config, n_layers=most))

    return replace(parity, model=with_fewer)


def pp_of(case):
    return case.sizes.get("pp", 1)


@lru_cache
def subject_of(case, optimizer, dtype):
    return make_subject_of(prepare(parity_of(case), case), optimizer, dtype)


# By what one device computes: all layouts of a model have it in common.
REFERENCES = {}


def reference_of(case, optimizer, dtype):
    key = case.model, pp_of(case), case.data, optimizer, dtype
    if key not in REFERENCES:
        REFERENCES[key] = compute_reference(subject_of(case, optimizer, dtype))
    return REFERENCES[key]


def observe(rank, trainings):
    """Of each training, what this rank saw, in the process group that there is. They have a layout in common, and so
    its mesh: DTensor has found only once how an operator goes on it."""
    seen = []
    with (
        patch("mmm_verify.rank.process_group", lambda *_: nullcontext()),
        patch("mmm_verify.rank._run_alone", lambda *_: None),
        patch("mmm_lab.parity.subject.build_mesh", cache(build_mesh)),
    ):
        for training, reference in trainings:
            observed = run_rank(rank, subject_of(*training), reference, dropout=False, timeout=PATIENCE)
            # What modules returned only explains a difference: of eight trainings it takes gigabytes.
            seen.append(replace(observed, parallel=replace(observed.parallel, outputs={})))
    return seen


def trainings_of(item):
    """Of a test's item, one for each optimizer."""
    case, dtype = (item.callspec.params[name] for name in ("case", "dtype"))
    return [(case, optimizer, dtype) for optimizer in case.optimizers]


def observe_on_ranks(run_on_ranks, items):
    """Of each item, and each of its trainings, what all ranks saw."""
    trainings = [training for item in items for training in trainings_of(item)]
    with_references = [(training, reference_of(*training)) for training in trainings]
    ranks = run_on_ranks(observe, trainings[0][0].ranks, with_references, timeout=PATIENCE)
    by_training = zip(*ranks, strict=True)
    return [[next(by_training) for _ in trainings_of(item)] for item in items]


def layout_of(item):
    case = item.callspec.params["case"]
    return case.model, case.layout


OBSERVED = {}


@pytest.fixture
def observed(run_on_ranks, request):
    """What all ranks saw of the test's case, by optimizer. All cases of a model on one layout are run in one call: most
    of a call is its start."""
    own = request.node
    if own.nodeid not in OBSERVED:
        tests = [item for item in request.session.items if item.function == own.function]
        group = [item for item in tests if layout_of(item) == layout_of(own)]
        names = [item.nodeid for item in group]
        try:
            OBSERVED.update(zip(names, observe_on_ranks(run_on_ranks, group), strict=True))
        # One case; the others are not to fail with it.
        except RanksFailed:
            OBSERVED.update(dict.fromkeys(names))
    seen = OBSERVED.pop(own.nodeid)
    if seen is None:
        (seen,) = observe_on_ranks(run_on_ranks, [own])
    return seen


@pytest.mark.parametrize(("case", "dtype"), all_cases())
def test_same_as_plain_pytorch(observed, case, dtype):
    for optimizer, ranks in zip(case.optimizers, observed, strict=True):
        subject = subject_of(case, optimizer, dtype)
        reference = reference_of(case, optimizer, dtype)
        verdict = evaluate(look(subject, reference, ranks, make_batch(subject)))
        assert verdict.same, verdict
        # Nothing is left out without a word.
        assert verdict.compared.keys() == {"weights", "batch", "loss", "gradients", "step", "step 2"}


@pytest.mark.parametrize(("digits", "device", "same"), [(1, "cpu", False), (1, "cuda", True), (1000, "cuda", False)])
def test_weights_that_a_gpu_draws_differ_by_the_last_digit(run_on_ranks, digits, device, same):
    """Compared bit for bit, every model with normal weights is accused on a GPU."""
    training = ParityCase(model="gpt", layout="1"), "sgd", "fp64"
    (observed,) = run_on_ranks(observe, 1, [(training, reference_of(*training))], timeout=PATIENCE)
    (on_rank,) = observed
    for weight in on_rank.parallel.weights.values():
        weight.local.mul_(1 + digits * torch.finfo(torch.float64).eps)
    subject = replace(subject_of(*training), device=device)
    verdict = evaluate(look(subject, reference_of(*training), [on_rank], make_batch(subject)))
    assert verdict.same == same, verdict
    assert verdict.first == ("" if same else "tok_embeddings.weight")
