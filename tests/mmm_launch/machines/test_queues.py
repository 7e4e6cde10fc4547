"""Which jobs a queue takes, and which queue a job is of."""

import pytest

from mmm_launch.machines.find import find
from mmm_launch.machines.machine import Machine
from mmm_launch.machines.queues import limits_of, not_taken, queue_for

HOUR = 3600.0


@pytest.mark.parametrize(
    ("site", "queue", "hosts", "hours", "says"),
    [
        (
            "polaris",
            "prod",
            4,
            6,
            "prod takes 10 to 24 hosts for 3 h, 25 to 99 hosts for 6 h, 100 to 496 hosts for 24 h",
        ),
        ("polaris", "prod", 4, 6, "; such a job is of --queue capacity or preemptable (Polaris: https://docs.alcf."),
        ("polaris", "prod", 24, 4, "; no queue takes such a job"),
        ("polaris", "prod", 25, 6, ""),
        ("polaris", "capacity", 4, 168, ""),
        (
            "polaris",
            "capacity",
            5,
            1,
            "capacity takes 1 to 4 hosts for 168 h; such a job is of --queue debug-scaling or",
        ),
        ("polaris", "of-a-reservation", 4, 6, ""),
        ("frontier", "batch", 91, 2.01, "; no queue takes such a job"),
        ("frontier", "batch", 91, 2, ""),
        ("perlmutter", "regular", 4, 1000, ""),
    ],
)
def test_what_a_queue_takes(site, queue, hosts, hours, says):
    machine, _ = find({}, site)
    said = not_taken(machine, queue, hosts, hours * HOUR)
    assert says in said
    assert bool(says) == bool(said)


def test_the_queue_of_a_job():
    polaris, _ = find({}, "polaris")
    assert [queue_for(polaris, hosts, HOUR) for hosts in (2, 4, 10, 560)] == ["debug", "debug-scaling", "prod", "prod"]
    assert queue_for(Machine("own", queue="all"), 4, HOUR) == "all"


@pytest.mark.parametrize("site", ["polaris", "aurora", "frontier"])
def test_the_usual_queue_is_known(site):
    machine, _ = find({}, site)
    assert machine.queue in {limit.queue for limit in limits_of(machine)}
    assert all(limit.low <= limit.high <= machine.hosts for limit in limits_of(machine))
    assert len(limits_of(machine)) == len(machine.queues)
