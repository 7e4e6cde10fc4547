"""Machine files: all that come with the package can be used, and name their sources; wrong ones are refused."""

import json
from dataclasses import fields

import pytest

from mmm.errors import ConfigError
from mmm.launch.plan.sites import load as launch_sites
from mmm.plan.machine import Machine, changed, known_machines, load, parse_bytes, read
from mmm.plan.network import Group, collective, group_of

GOOD = {"name": "x", "gpu_memory": 1e9, "memory_bandwidth": 1e9}
TOLD = {"name", "about", "sources", "script", "site", "scheduler", "device"}


def test_the_sites_of_the_issue_are_there():
    assert {"aurora", "polaris", "perlmutter", "frontier", "dgx-h100", "dgx-h200", "laptop"} <= set(known_machines())


@pytest.mark.parametrize("name", list(known_machines()))
def test_every_value_has_a_source(name):
    machine = load(name, "--site")
    given = json.loads(known_machines()[name].read_text())
    for field in fields(Machine):
        if field.name in given and field.name not in TOLD:
            assert machine.sources.get(field.name), field.name
    assert set(machine.sources) <= {field.name for field in fields(Machine)}
    assert machine.peak("fp32" if machine.device == "cpu" else "bf16") > 1e11
    assert not machine.site or launch_sites({})[machine.site].ranks_per_host == machine.gpus_per_host
    assert any("data sheet" in line or "assumed" in line for line in machine.explain())


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("80 GB", 80e9), ("1.5TiB", 1.5 * 2**40), ("40gib", 40 * 2**30), ("68719476736", 2**36)],
)
def test_units(text, size):
    assert parse_bytes(text, "--gpu_memory") == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0GiB", "64Gb1", "64 parsecs", "64", "1e999GiB", "nan", "1..2GiB"]
)
def test_wrong_units(text):
    with pytest.raises(ConfigError, match="--gpu_memory"):
        parse_bytes(text, "--gpu_memory")


@pytest.mark.parametrize(
    "more",
    [
        {"memory_bandwidht": 1},
        {"memory_bandwidth": "fast"},
        {"memory_bandwidth": -1},
        {"hosts": 1.5},
        {"hosts": 0},
        {"gpus_per_host": 2},
        {"matmul_efficiency": 1.2},
        {"overlap": 2},
        {"scheduler": "lsf"},
        {"peak_flops": 3},
        {"gpu_memory": True},
    ],
    ids=str,
)
def test_wrong_files(more):
    with pytest.raises(ConfigError, match="here"):
        read({**GOOD, **more}, "here")
    assert read(GOOD, "here").name == "x"


def test_what_the_command_line_changes_is_its_own_source():
    machine = changed(load("aurora", "--site"), {"hosts": 4, "gpu_memory": None})
    assert (machine.hosts, machine.ranks, machine.sources["hosts"]) == (4, 48, "the command line")


def test_groups_on_hosts_of_twelve():
    machine = changed(load("aurora", "--site"), {"hosts": 4})
    assert group_of(12, 1, machine) == Group(12, 12, False)
    assert group_of(8, 1, machine) == Group(8, 4, True)  # ranks 8 … 15 are on two hosts, four on each
    assert group_of(48, 1, machine) == Group(48, 12, True)
    assert group_of(4, 12, machine) == Group(4, 1, True)
    assert group_of(2, 3, machine) == Group(2, 2, False)


def test_collectives_take_latency_and_bytes():
    machine = Machine(
        name="x",
        hosts=4,
        gpus_per_host=4,
        link_bandwidth=100.0,
        link_latency=1.0,
        network_bandwidth=40.0,
        network_latency=10.0,
        link_efficiency=1.0,
        network_efficiency=1.0,
    )
    assert collective("all_gather", Group(4, 4, False), 400.0, machine) == 3 * 1 + 0.75 * 400 / 100
    # A ring over all hosts uses the adapters of all four devices; one of a device a host its own alone.
    assert collective("all_gather", Group(16, 4, True), 1600.0, machine) == 3 * 1 + 3 * 10 + 15 / 16 * 1600 / 40
    assert collective("all_gather", Group(4, 1, True), 400.0, machine) == 3 * 10 + 0.75 * 400 / 10
    assert collective("all_reduce", Group(4, 1, True), 400.0, machine) == 2 * 2 * 10 + 1.5 * 400 / 10  # a tree
    assert collective("all_reduce", Group(1, 1, False), 400.0, machine) == 0
