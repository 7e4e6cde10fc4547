"""Decides how many ranks each host gets. The first of these that applies decides:

-ppn    that many on each host; with -n too, host after host until all ranks are placed
-n      evenly over the hosts, and on no host more than it has slots, if there are enough slots
slots   one rank for each slot of --hosts or --hostfile, else for each task that the job asked for
else    one rank for each accelerator, else one rank

-ppn and -n decide also where there are fewer slots than ranks, and a note says so: a job often asks for one task a
host, and leaves it to launch to start the ranks.
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
    """How many ranks each host gets.

    Attributes:
        hosts: names of the hosts that have ranks, in order.
        counts: number of ranks of each of them.
        why: which rule has decided, in words.
        notes: lines that launch prints before the start.
    """

    hosts: tuple[str, ...]
    counts: tuple[int, ...]
    why: str
    notes: tuple[str, ...] = ()


def place(
    options: LaunchOptions, job: Job, listed: hosts.Hosts, devices: Value[int | None], otherwise: int = 1
) -> Placement:
    """Place the ranks on the hosts `listed`, or on the first -N of them. Raises `LaunchError`.

    Args:
        listed: host → its slots.
        devices: number of accelerators of a host, which get one rank each. None: none are known, or none are used.
        otherwise: number of ranks of a host where nothing says how many.
    """
    if options.nhosts is not None and options.nhosts > len(listed):
        raise LaunchError(f"-N {options.nhosts}: number of hosts listed: {len(listed)}. Leave -N out, or list more.")
    names = list(listed)[: options.nhosts]
    slots = _slots(job, {name: listed[name] for name in names})
    notes = []
    if options.nproc or options.ppn:
        counts, why = _asked(options, slots, len(names))
    elif slots:
        counts = slots
        why = "a rank a slot"
        if devices.value and max(slots) < devices.value:
            notes.append(
                f"{why}: {max(slots)} of {devices.value} accelerators of a host are used ({devices.source}), because a "
                f"rank uses one: -ppn {devices.value} uses all"
            )
    elif devices.value:
        counts = [devices.value] * len(names)
        why = f"one per accelerator: {devices.source}"
    else:
        counts = [otherwise] * len(names)
        why = f"-n not given; {devices.source}"
        ranks = "1 rank"
        if otherwise > 1:
            ranks = f"{otherwise} ranks"
        notes.append(f"{devices.source}: {ranks} a host (choose with -n)")
    if max(counts) > MAX_RANKS:
        raise LaunchError(f"{max(counts)} ranks on a host: their number must be from 1 to {MAX_RANKS}.")
    is_crowded = slots and any(count > room for count, room in zip(counts, slots, strict=True))
    if is_crowded:
        notes.append(f"{why} decides: ranks {sum(counts)}, slots {sum(slots)}")
    # With -n there may be fewer ranks than hosts. The hosts without ranks get no agent either.
    ranks_of = {name: count for name, count in zip(names, counts, strict=True) if count}
    if len(ranks_of) < len(listed):
        notes.append(f"{len(ranks_of)} of {len(listed)} hosts are used")
    return Placement(
        hosts=tuple(ranks_of),
        counts=tuple(ranks_of.values()),
        why=why,
        notes=tuple(notes),
    )


def _asked(options: LaunchOptions, slots: list[int], n_hosts: int) -> tuple[list[int], str]:
    """Return the number of ranks of each host by -n and -ppn, and which of the two decided. Raises `LaunchError`."""
    total = options.nproc
    per_host = options.ppn
    if total is None:
        return [per_host or 0] * n_hosts, "-ppn"
    if per_host is None:
        # With too few slots they do not count: -n decides, and a note says so.
        limits = slots
        if sum(slots) < total:
            limits = [total] * n_hosts
        return spread(total, limits), "-n"
    if total > per_host * n_hosts:
        raise LaunchError(f"-n {total} with {per_host} a host takes more hosts than there are: {n_hosts}.")
    # The first hosts are filled; the last one that is used may have fewer.
    counts = []
    for host in range(n_hosts):
        left = max(0, total - per_host * host)
        counts.append(min(per_host, left))
    return counts, "-n, -ppn"


def _slots(job: Job, listed: hosts.Hosts) -> list[int]:
    """Return the number of slots of each host. Empty: nothing says it."""
    # A host that is listed without a number has one slot.
    if any(listed.values()):
        return [count or 1 for count in listed.values()]
    if not job.tasks:
        return []
    # --hosts may name the job's hosts with or without their domain: compare what two names have in common.
    tasks = {hosts.host_key(name): count for name, count in zip(job.hosts, job.tasks, strict=True)}
    slots = [tasks[hosts.host_key(name)] for name in listed]
    if not any(slots):
        return []
    return slots
