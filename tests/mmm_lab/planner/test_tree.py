"""Every statement of the decision tree; and the facts that it asks, of models and machines."""

import pytest

from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.tree import Facts, across_hosts, decide, facts_of
from mmm_launch.machines.find import named


def tree(**facts):
    return decide(Facts(**{"fits": False, "largest_fits": True, "devices": 8, "hosts": 1, "fast": True, **facts}))


MANY = {"devices": 128, "hosts": 16}


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ({"fits": True, "devices": 1}, "nothing: one device"),
        ({"fits": True}, "DDP"),
        ({"fits": True, "fast": False}, "DDP"),
        ({"fits": True, **MANY}, "DDP"),
        ({"fits": True, "fast": False, **MANY}, "DDP"),
        ({"devices": 1}, "ZeRO with offload"),
        ({"devices": 1, "largest_fits": False}, "more devices"),
        ({"largest_fits": False}, "tp, since a layer does not fit"),
        ({"largest_fits": False, **MANY}, "tp, since a layer does not fit"),
        ({}, "tp, pp or ZeRO (fsdp), about even"),
        ({"fast": False}, "pp"),
        (MANY, "ZeRO (fsdp, hsdp), or pp·tp·dp"),
        ({"fast": False, **MANY}, "dp·pp·tp with ZeRO-1"),
    ],
    ids=str,
)
def test_answers(facts, answer):
    assert answer in tree(**facts).answer


def test_axes():
    assert tree(devices=1).axes == ("offload",)
    assert tree(fast=False).axes == ("pp",)
    assert tree(largest_fits=False).axes[0] == "tp"


def test_a_path_has_the_questions_that_were_asked():
    assert [question for question, _ in tree(fits=True, devices=1).path] == [
        "does the model fit on one device?",
        "is there more than one device?",
    ]
    assert len(tree(devices=128, hosts=16).path) == 5


def test_a_layer_that_does_not_fit():
    spec = read_model("llama-70b", {"dim": 65536, "n_heads": 512, "ffn_dim": 262144}, 2048)
    machine = named({}, "polaris").changed({"hosts": 16})
    assert not facts_of(spec, machine, MemoryModel(spec, "cuda", "bf16"))[0].largest_fits


def test_a_tensor_parallel_group_over_hosts():
    polaris, aurora = named({}, "polaris").changed({"hosts": 4}), named({}, "aurora").changed({"hosts": 4})
    assert "tp 8 spans hosts of 4 devices" in across_hosts(8, polaris)
    assert across_hosts(8, polaris).endswith("tp 4 stays inside")
    assert across_hosts(4, polaris) == ""
    assert across_hosts(8, aurora).endswith("tp 6 stays inside")  # 12 ranks of a host: the second group has 4 of each
    assert across_hosts(8, polaris.changed({"hosts": 1})) == ""
