"""Which jobs the queues of a known machine take, as its file has it. Sites change that: their scheduler has the last
word."""

from __future__ import annotations

from typing import NamedTuple

from mmm_launch.machines.machine import QUEUE, Machine


class Limit(NamedTuple):
    """A queue takes jobs of `low` to `high` hosts, for so many hours at most."""

    queue: str
    low: int
    high: int
    hours: int

    def takes(self, hosts: int, seconds: float) -> bool:
        return self.low <= hosts <= self.high and seconds <= 3600 * self.hours


def limits_of(machine: Machine) -> list[Limit]:
    """What the machine's file says of its queues; empty where it says nothing."""
    found = [match.groups() for text in machine.queues if (match := QUEUE.fullmatch(text))]
    return [Limit(name, int(low), int(high), int(hours)) for name, low, high, hours in found]


def queue_for(machine: Machine, hosts: int, seconds: float) -> str:
    """The usual queue; another, if that one does not take such a job."""
    taking = [limit.queue for limit in limits_of(machine) if limit.takes(hosts, seconds)]
    return taking[0] if taking and machine.queue not in taking else machine.queue


def not_taken(machine: Machine, queue: str, hosts: int, seconds: float) -> str:
    """That a queue takes no such job, and which ones do; empty where it does, or nothing is known of it."""
    limits = limits_of(machine)
    own = [limit for limit in limits if limit.queue == queue]
    if not own or any(limit.takes(hosts, seconds) for limit in own):
        return ""
    sizes = ", ".join(f"{limit.low:,} to {limit.high:,} hosts for {limit.hours} h" for limit in own)
    taking = [limit.queue for limit in limits if limit.takes(hosts, seconds)]
    others = f"; such a job is of --queue {' or '.join(taking)}" if taking else "; no queue takes such a job"
    return f"queue {queue} takes {sizes}{others} ({machine.source_of('queues')})"
