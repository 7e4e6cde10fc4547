"""How many ranks each of the hosts gets. In this order:

-ppn    as many on each host; with -n until these are placed, host after host
-n      evenly over the hosts, and on none more than it has slots, if all slots are enough
slots   a rank a slot: of --hosts and --hostfile; else those that the job asked for
else    a rank an accelerator; 1

What -ppn or -n asks for decides, also where there are fewer slots: a note says so. A job often has one task a host, for
launch to start the ranks.
"""

from dataclasses import dataclass

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job, spread
from mmm_launch.spec.launch_spec import Value
from mmm_launch.spec.options import LaunchOptions

# The most ranks on one host.
MAX_RANKS = 4096


@dataclass(frozen=True)
class Placement:
    """hosts: those that have ranks, in order. counts: how many each has. why: in words. notes: what is to be said."""

    hosts: tuple[str, ...]
    counts: tuple[int, ...]
    why: str
    notes: tuple[str, ...] = ()


def place(
    options: LaunchOptions, job: Job, listed: hosts.Hosts, devices: Value[int | None], otherwise: int = 1
) -> Placement:
    """The ranks on the hosts `listed`, or on the first -N of them. Raises `LaunchError`.

    Args:
        devices: a host's accelerators, for which there is one rank each; None where none are known or used.
        otherwise: ranks of a host where nothing says how many.
    """
    if options.nhosts is not None and options.nhosts > len(listed):
        raise LaunchError(f"-N {options.nhosts}: the hosts listed are {len(listed)}.")
    names = list(listed)[: options.nhosts]
    slots = _slots(job, {name: listed[name] for name in names})
    notes = []
    if options.nproc or options.ppn:
        counts, why = _asked(options, slots, len(names))
    elif slots:
        counts = slots
        why = "a rank a slot"
    elif devices.value:
        counts = [devices.value] * len(names)
        why = f"one per accelerator: {devices.source}"
    else:
        counts = [otherwise] * len(names)
        why = f"-n not given; {devices.source}"
        notes.append(f"{devices.source}: {otherwise} rank{'' if otherwise == 1 else 's'} a host (choose with -n)")
    if max(counts) > MAX_RANKS:
        raise LaunchError(f"{max(counts)} ranks on a host: their number must be from 1 to {MAX_RANKS}.")
    if slots and any(count > room for count, room in zip(counts, slots, strict=True)):
        notes.append(f"{why} decides: ranks {sum(counts)}, slots {sum(slots)}")
    used = [(name, count) for name, count in zip(names, counts, strict=True) if count]
    if len(used) < len(listed):
        notes.append(f"{len(used)} of {len(listed)} hosts are used")
    return Placement(tuple(name for name, _ in used), tuple(count for _, count in used), why, tuple(notes))


def _asked(options: LaunchOptions, slots: list[int], number: int) -> tuple[list[int], str]:
    """The ranks of each of so many hosts, by -n and -ppn, and why. Raises `LaunchError`."""
    total = options.nproc
    per_host = options.ppn
    if total is None:
        return [per_host or 0] * number, "-ppn"
    if per_host is None:
        limits = slots if sum(slots) >= total else [total] * number
        return spread(total, limits), "-n"
    if total > per_host * number:
        raise LaunchError(f"-n {total} with {per_host} a host takes more hosts than there are: {number}.")
    return [min(per_host, max(0, total - per_host * place)) for place in range(number)], "-n, -ppn"


def _slots(job: Job, listed: hosts.Hosts) -> list[int]:
    """The slots of each host; empty where nothing says them."""
    # A host that is listed without a number has one slot.
    if any(listed.values()):
        return [count or 1 for count in listed.values()]
    if not job.tasks:
        return []
    tasks = {hosts.host_key(name): count for name, count in zip(job.hosts, job.tasks, strict=True)}
    found = [tasks[hosts.host_key(name)] for name in listed]
    return found if any(found) else []
