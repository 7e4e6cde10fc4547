"""How many ranks each of the hosts gets. In this order:

-ppn    as many on each host; with -n until these are placed, host after host
-n      evenly over the hosts, and on none more than it has slots, if all slots are enough
slots   a rank a slot: of --hosts and --hostfile; else those that the job asked for
else    a rank an accelerator; 1

More ranks than slots are refused where hosts have different numbers of slots; where all have the same, -ppn or -n
decides, and a note says so: a job often has one task a host, for launch to start the ranks.
"""

from dataclasses import dataclass

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job, in_words, is_even, spread
from mmm_launch.spec.options import MAX_RANKS, LaunchOptions

NO_REASON = "nothing says more"
SHOWN = 8  # hosts in a message


@dataclass(frozen=True)
class Placement:
    """hosts: those that have ranks, in order. counts: how many each has. why: in words. notes: what is to be said."""

    hosts: tuple[str, ...]
    counts: tuple[int, ...]
    why: str
    notes: tuple[str, ...] = ()


def place(options: LaunchOptions, job: Job, listed: hosts.Hosts, devices: int | None, devices_why: str) -> Placement:
    """The ranks on the hosts `listed`, or on the first -N of them. Raises `LaunchError`.

    Args:
        devices: a host's accelerators, for which there is one rank each; None or 0 where none are known or used.
    """
    if options.nhosts is not None and options.nhosts > len(listed):
        are = "is 1 host" if len(listed) == 1 else f"are {len(listed)} hosts"
        raise LaunchError(f"-N {options.nhosts}: there {are}.")
    names = list(listed)[: options.nhosts]
    slots, slots_why = _slots(job, {name: listed[name] for name in names})
    notes = []
    if options.nproc is not None:
        counts, why = _of_total(options.nproc, options, len(names), slots)
    elif options.per_host is not None:
        counts, why = [options.per_host] * len(names), f"-ppn, × {len(names)} hosts"
    elif slots is not None:
        counts, why = slots, slots_why
    else:
        each, why = (devices, f"one per accelerator: {devices_why}") if devices else (1, NO_REASON)
        counts, why = [each] * len(names), f"{why}, × {len(names)} hosts"
    if max(counts) > MAX_RANKS:
        raise LaunchError(
            f"{max(counts)} ranks on each host: the number of ranks on a host must be from 1 to {MAX_RANKS}."
        )
    if slots is not None and any(count > room for count, room in zip(counts, slots, strict=True)):
        asked = why.partition(",")[0]
        if not is_even(slots):
            raise LaunchError(
                f"{asked}: the ranks would be {in_words(counts, SHOWN)}, and the slots {in_words(slots, SHOWN)} "
                f"({slots_why}). Hosts with different numbers of slots get a rank a slot.\n  Ask for at most "
                f"{sum(slots)} ranks, by -n alone, or say how many the hosts have: --hosts {names[0]}:{max(counts)},…"
            )
        notes.append(f"{sum(counts)} ranks are on {sum(slots)} slots ({slots_why}): {asked} decides")
    if why.startswith(NO_REASON):
        notes.append("no accelerators known: 1 rank on each host (choose with -ppn or -n)")
    used = [(name, count) for name, count in zip(names, counts, strict=True) if count]
    if len(used) < len(listed):
        notes.append(f"{len(used)} of {len(listed)} hosts are used")
    return Placement(tuple(name for name, _ in used), tuple(count for _, count in used), why, tuple(notes))


def _slots(job: Job, listed: hosts.Hosts) -> tuple[list[int] | None, str]:
    """The slots of each host, None where nothing says them, and who says them."""
    if any(listed.values()):  # a host without a number is one slot
        return [count or 1 for count in listed.values()], "slots in the list of hosts"
    if not job.tasks:
        return None, ""
    tasks = {hosts.host_key(name): count for name, count in zip(job.hosts, job.tasks, strict=True)}
    found = [tasks[hosts.host_key(name)] for name in listed]
    return (found, job.why["tasks"]) if any(found) else (None, "")


def _of_total(total: int, options: LaunchOptions, hosts_given: int, slots: list[int] | None) -> tuple[list[int], str]:
    """`total` ranks on so many hosts, and why. Raises `LaunchError`."""
    per_host = options.per_host
    if per_host is None:
        limits = slots if slots is not None and sum(slots) >= total else [total] * hosts_given
        counts, why = spread(total, limits), "-n"
        largest = max(counts)
    else:
        if total > per_host * hosts_given:
            raise LaunchError(
                f"-n {total} with {per_host} a host takes {-(-total // per_host)} hosts, and there are {hosts_given}: "
                f"at most -n {per_host * hosts_given}, or a larger -ppn."
            )
        counts = [min(per_host, max(0, total - per_host * number)) for number in range(hosts_given)]
        why, largest = "-n, -ppn", per_host
    filled = sum(count > 0 for count in counts)
    if options.nhosts is not None and filled < options.nhosts:
        raise LaunchError(
            f"-n {total} -ppn {largest} -N {options.nhosts}: {total} ranks, {largest} a host, fill {filled} "
            f"hosts, not {options.nhosts}. Leave one of the three out."
        )
    return counts, why
