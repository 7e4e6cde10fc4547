"""A layout that was asked for by its sizes: it alone is looked at, and what does not go says which rule it breaks."""

import pytest

from mmm_lab.planner.asked import exactly, why_not
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.report import missing
from mmm_lab.planner.search import Search
from mmm_launch.machines.find import named

SPEC = read_model("llama-8b", {}, 2048)


def asked(batch=64, hosts=2, **fixed):
    """On hosts of 8 devices."""
    return Search(SPEC, named({}, "dgx-h100").changed({"hosts": hosts}), batch, "bf16", fixed=exactly(fixed))


def test_one_layout_is_looked_at():
    found = asked(tp=2, pp=2, microbatches=8).run()
    (best,) = found.best
    assert str(best.layout) == "pp2·dp4·tp2"
    assert (best.techniques.schedule, best.techniques.stages_per_rank, best.trial.microbatches) == ("1F1B", 1, 8)
    assert best.techniques.data_parallel == "fsdp"
    (best,) = asked(pp=4, schedule="Interleaved1F1B").run().best
    assert (best.techniques.stages_per_rank, best.trial.microbatches) == (2, 4)  # the fewest that the schedule takes


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"tp": 3}, "start 15"),
        ({"ep": 3}, "dp_shard 16"),
        ({"ep": 2}, "ep 2: the model has no experts to shard"),
        ({"data_parallel": "ddp", "tp": 2}, "ddp keeps the full model on every rank, which does not go with tp 2"),
        ({"data_parallel": "hsdp"}, "dp_shard"),
        (
            {"data_parallel": "hsdp", "dp_replicate": 16},
            "dp_shard",
        ),
        (
            {"data_parallel": "zero1", "pp": 16, "microbatches": 16},
            "zero1",
        ),
        ({"dp_replicate": 2}, "dp_replicate 2"),
        ({"cp": 16, "cp_style": "ulysses", "batch": 1, "hosts": 16}, "batch 1"),
        ({"cp": 64, "cp_style": "ulysses", "hosts": 8}, "n_heads 32"),
        ({"cp": 2, "cp_style": "usp"}, "cp_style"),
        ({"batch": 8}, "batch 8"),
        ({"microbatches": 3}, "microbatches 3"),
        ({"pp": 4, "microbatches": 2}, "microbatches 2: 1F1B"),
        ({"pp": 2, "stages_per_rank": 3}, "stages_per_rank 3: 1F1B"),
        ({"pp": 64, "hosts": 8, "microbatches": 64}, "the model has 34 parts, fewer than pp 64"),
    ],
    ids=str,
)
def test_what_does_not_go_says_its_rule(fixed, said):
    search = asked(**fixed)
    found = search.run()
    assert not found.kinds
    assert said in missing(search, found)


def test_of_a_search_only_what_no_layout_can_have_is_refused():
    machine = named({}, "dgx-h100").changed({"hosts": 2})
    assert why_not(Search(SPEC, machine, 64, "bf16", fixed={"data_parallel": "hsdp"})) == ""
    assert "tp 3 needs a multiple of 3" in why_not(Search(SPEC, machine, 64, "bf16", fixed={"tp": 3}))
