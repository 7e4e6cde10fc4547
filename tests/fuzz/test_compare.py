"""Which differences the fuzzer takes for faults, and how it makes a case smaller."""

from pathlib import Path

import pytest

from fuzz.compare import Verdict, judge, shrink, twin
from fuzz.draw import Case
from fuzz.run import Outcome

LOSSES = [5.0, 4.0, 3.0]


def case(program="lm", ranks=4, **flags):
    return Case("0/0", program, ranks, {"device": "cpu", **flags}, (), Path("/data"))


def ran(dtype="fp64", scales=(), weights=None, **series):
    facts = {"precision": {"name": dtype}, "global_batch_size": 8}
    series = {name: list(values) for name, values in series.items()}
    return Outcome("ran", series=series or {"loss": LOSSES}, facts=facts, scales=list(scales), weights=weights or {})


def verdict(many, one, **flags):
    return judge(case(**flags), many, lambda twin: one)


def test_the_twin_is_the_same_problem_on_one_rank():
    flags = {
        "pp": "2",
        "schedule": "ZBVZeroBubble",
        "microbatches": "2",
        "batch_size": "3",
        "lr": "0.1",
        "loss_chunks": "2",
        "workers": "2",
        "flush_every": "1",
    }
    kept = {"lr": "0.1", "on_nan": "skip"}  # a step that is left out is one whose loss is in no mean
    one = twin(case(ranks=8, tpsize="2", **(flags | kept)), {"global_batch_size": 6})
    assert one.ranks == 1
    assert one.flags == {"device": "cpu", **kept, "global_batch_size": "6", "save_model": "on"}
    assert twin(case(**flags), {"global_batch_size": 20}).flags["global_batch_size"] == "20"
    refused = twin(case(ranks=8, tpsize="2", **flags))
    assert (refused.flags["global_batch_size"], refused.flags["flush_every"], "pp" in refused.flags) == (
        "6",
        "1",
        False,
    )
    scaled = twin(case("cnn", 8, tpsize="2", scale_lr="sqrt", lr="0.1"), {"global_batch_size": 256})
    assert (scaled.flags["lr"], scaled.flags["scale_lr"], scaled.flags["global_batch_size"]) == ("0.1", "sqrt", "256")


@pytest.mark.parametrize(
    ("dtype", "close", "far"), [("fp64", 1e-10, 1e-8), ("fp32", 5e-5, 3e-4), ("bf16", 0.02, 0.1), ("fp16", 0.01, 0.1)]
)
@pytest.mark.parametrize("name", ["loss", "val_loss"])
def test_losses_and_evaluations_within_a_bound(dtype, close, far, name):
    one = ran(dtype, loss=LOSSES, val_loss=[float("nan"), 2.0, 2.0])
    for error, kind in ((close, "equal"), (far, "different")):
        many = ran(dtype, loss=LOSSES, val_loss=[float("nan"), 2.0, 2.0])
        many.series[name][1] *= 1 + error
        assert verdict(many, one).kind == kind
    assert "row 1" in verdict(many, one).about


def test_a_faulty_case_loses_what_it_does_not_need():
    fault = Verdict("different", "", "the fault")

    def verdict_of(some):
        wrong = some.flags.get("tpsize") == "2" and some.ranks >= 2 and some.flags.get("optimizer") == "sgd"
        return fault if wrong else Verdict("equal")

    full = case(ranks=8, tpsize="2", pp="2", optimizer="sgd", schedule="GPipe", lr="0.1", dim="8", max_iters="3")
    small = shrink(full, verdict_of, fault, 10.0)
    assert small.ranks == 2
    assert small.flags.keys() == {"tpsize", "optimizer", "device", "dim", "max_iters"}
    assert shrink(full, verdict_of, fault, 0.0) == full
