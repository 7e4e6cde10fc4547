"""Every statement of the decision tree; and the facts that it asks, of models and machines."""

import pytest

from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.tree import Facts, across_hosts, decide, facts_of
from mmm_launch.machines.find import named


def tree(**facts):
    return decide(Facts(**{"fits": False, "largest_fits": True, "devices": 8, "hosts": 1, "fast": True, **facts}))


def test_one_device_and_it_fits():
    assert tree(fits=True, devices=1).answer == "nothing: one device"


@pytest.mark.parametrize("hosts", [1, 16])
@pytest.mark.parametrize("fast", [True, False])
def test_fits_on_one_of_many(hosts, fast):
    assert tree(fits=True, devices=8 * hosts, hosts=hosts, fast=fast).answer == "DDP"


def test_does_not_fit_on_the_only_device():
    assert "ZeRO with offload" in tree(devices=1).answer
    assert tree(devices=1).axes == ("offload",)


def test_the_largest_layer_does_not_fit():
    assert tree(devices=1, largest_fits=False).answer.startswith("more devices")
    for hosts in (1, 16):
        decision = tree(devices=8 * hosts, hosts=hosts, largest_fits=False)
        assert decision.answer.startswith("tp, since a layer does not fit")
        assert decision.axes[0] == "tp"


def test_one_host_fast_links():
    assert tree().answer == "tp, pp or ZeRO (fsdp), about even"


def test_one_host_slow_links():
    assert tree(fast=False).axes == ("pp",)


def test_many_hosts_fast_links():
    assert tree(devices=128, hosts=16).answer == "ZeRO (fsdp, hsdp), or pp·tp·dp"


def test_many_hosts_slow_links():
    decision = tree(devices=128, hosts=16, fast=False)
    assert decision.answer.startswith("dp·pp·tp with ZeRO-1")
    assert decision.path[-1] == ("are the links fast?", "no")


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
