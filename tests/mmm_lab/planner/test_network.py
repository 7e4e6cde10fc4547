"""Which ranks share a host, and what a collective of theirs takes."""

from mmm_lab.planner.network import Group, collective, group_of
from mmm_launch.machines.find import named
from mmm_launch.machines.machine import Machine


def test_groups_on_hosts_of_twelve():
    machine = named({}, "aurora").changed({"hosts": 4})
    assert group_of(12, 1, machine) == Group(12, 12, False)
    assert group_of(8, 1, machine) == Group(8, 4, True)  # ranks 8 … 15 are on two hosts, four on each
    assert group_of(48, 1, machine) == Group(48, 12, True)
    assert group_of(4, 12, machine) == Group(4, 1, True)
    assert group_of(2, 3, machine) == Group(2, 2, False)


MACHINE = Machine(
    name="x",
    hosts=4,
    ranks_per_host=4,
    link_bandwidth=100.0,
    link_latency=1.0,
    network_bandwidth=40.0,
    network_latency=10.0,
    link_efficiency=1.0,
    network_efficiency=1.0,
)


def test_collectives_take_latency_and_bytes():
    assert collective("all_gather", Group(4, 4, False), 400.0, MACHINE) == 3 * 1 + 0.75 * 400 / 100
    # A ring over all hosts uses the adapters of all four devices; one of a device a host its own alone.
    assert collective("all_gather", Group(16, 4, True), 1600.0, MACHINE) == 3 * 1 + 3 * 10 + 15 / 16 * 1600 / 40
    assert collective("all_gather", Group(4, 1, True), 400.0, MACHINE) == 3 * 10 + 0.75 * 400 / 10
    assert collective("all_reduce", Group(4, 1, True), 400.0, MACHINE) == 2 * 2 * 10 + 1.5 * 400 / 10  # a tree
    assert collective("all_reduce", Group(1, 1, False), 400.0, MACHINE) == 0


def test_an_all_to_all_sends_a_part_inside_the_host():
    """Of 16 ranks, 4 a host: 12 sixteenths of a buffer leave by a quarter of its network; 3 go over its links."""
    latency = 3 * 1 + 3 * 10
    across = collective("all_to_all", Group(16, 4, True), 1600.0, MACHINE)
    assert across == latency + 3 / 16 * 1600 / 100 + 12 / 16 * 1600 / (40 / 4)
    assert collective("all_to_all", Group(4, 4, False), 1600.0, MACHINE) == 3 * 1 + 3 / 4 * 1600 / 100
