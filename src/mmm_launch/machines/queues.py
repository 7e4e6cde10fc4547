"""Says which jobs the queues of a known machine take, by its file. Sites change that: the scheduler decides."""

from __future__ import annotations

from typing import NamedTuple

from mmm_launch.machines.machine import QUEUE, Machine


class Limit(NamedTuple):
    """A queue takes jobs of `low` to `high` hosts, for at most `hours` hours."""

    queue: str
    low: int
    high: int
    hours: int

    def takes(self, hosts: int, seconds: float) -> bool:
        return self.low <= hosts <= self.high and seconds <= 3600 * self.hours


def limits_of(machine: Machine) -> list[Limit]:
    """Return the limits of the machine's queues. Empty: its file gives none."""
    limits = []
    for text in machine.queues:
        match = QUEUE.fullmatch(text)
        if match is not None:
            name, low, high, hours = match.groups()
            limits.append(Limit(name, int(low), int(high), int(hours)))
    return limits


def queue_for(machine: Machine, hosts: int, seconds: float) -> str:
    """Return the machine's usual queue, or another one if the usual one does not take such a job."""
    taking = [limit.queue for limit in limits_of(machine) if limit.takes(hosts, seconds)]
    # If no queue takes the job, the usual one is named, and the scheduler says why it refuses.
    if not taking or machine.queue in taking:
        return machine.queue
    return taking[0]


def not_taken(machine: Machine, queue: str, hosts: int, seconds: float) -> str:
    """Say that a queue does not take such a job, and which queues do. Empty: it takes it, or its limits are unknown."""
    limits = limits_of(machine)
    own = [limit for limit in limits if limit.queue == queue]
    if not own or any(limit.takes(hosts, seconds) for limit in own):
        return ""
    sizes = [f"{limit.low:,} to {limit.high:,} hosts for {limit.hours} h" for limit in own]
    taking = [limit.queue for limit in limits if limit.takes(hosts, seconds)]
    others = "; no queue takes such a job"
    if taking:
        others = f"; for such a job give --queue {' or '.join(taking)}"
    return f"queue {queue} takes {', '.join(sizes)}{others} ({machine.source_of('queues')})"
