"""Reads host names as people and schedulers write them: host files, comma lists, and Slurm's `n[01-03,7]`.

It also says which of them is this host, holds what a scheduler says of its job, and spreads ranks over hosts. The
package python-hostlist reads only Slurm's form, and would be one more dependency.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmm_launch.contract import MOST_HOSTS, PORTS
from mmm_launch.errors import LaunchError

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
SLOTS = r"(?::|\s+slots=)0*([1-9]\d{0,5})"
# One entry of a list of hosts, with its slots where it has them.
ENTRY = re.compile(rf"({NAME.pattern})(?:{SLOTS})?(?:\s+max[-_]slots=\d+)?")
# The largest number in a host's name. More is a slip, and would make a list that fills the memory.
MOST = 10**6
# PBS names hosts by their Slingshot interface in the host files of some machines.
INTERFACE = re.compile(r"-hsn[0-9]+$")
# Host's name → its slots, or how often it was listed; 0: listed once, without a number.
# The order is that of the list.
Hosts = dict[str, int]


def parse_list(text: str) -> Hosts:
    """Read `a,b` or `a:4,b:4`, as --hosts gives it. Raises `LaunchError`."""
    listed: Hosts = {}
    for word in text.split(","):
        _add(listed, word.strip(), f"--hosts {text[:80]}")
    return listed


def parse_file(path: str | Path, source: str = "--hostfile") -> Hosts:
    """Read a host file: one host name on each line.

    A host with four slots stands on four lines (PBS), or has `slots=4` (Open MPI) or `:4` (MPICH) behind its name.
    Empty lines and `#` comments are skipped.

    Args:
        source: the option or variable that names the file, for messages.

    Raises:
        LaunchError: there is no such file, no host in it, or a line that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{source} {path} cannot be read: {error}.") from None
    listed: Hosts = {}
    for line_number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            _add(listed, entry, f"{source} {path}, line {line_number}")
    if not listed:
        raise LaunchError(f"{source} {path} names no host.")
    return listed


def expand(text: str) -> list[str]:
    """Expand Slurm's compact list of hosts, in order: `n[1-2,07],gpu3` → n1, n2, n07, gpu3. Raises `LaunchError`."""
    where = f"host list {text[:80]!r}"
    names: list[str] = []
    # Commas inside of brackets do not end a name: hide them.
    hidden = re.sub(r"\[[^\[\]]*\]", lambda match: match[0].replace(",", "\0"), text.strip())
    for word in hidden.split(","):
        beginnings = [""]
        # Piece by piece n[1-2]c[07] is "n", "1-2", "c", "07", "". Every second one stood in brackets.
        for index, piece in enumerate(re.split(r"\[([^\[\]]*)\]", word)):
            endings = [piece]
            if index % 2:
                endings = _in_brackets(piece, where)
            # Count before making the names: n[1-999][1-999][1-999] are a billion.
            check_number(len(names) + len(beginnings) * len(endings), where)
            beginnings = [beginning + ending for beginning in beginnings for ending in endings]
        names += beginnings
    for name in names:
        if not NAME.fullmatch(name):
            raise LaunchError(f"{where}: {name[:80]!r} is not a host name, or a name with numbers such as n[1-3,07].")
    return names


def _in_brackets(text: str, where: str) -> list[str]:
    """Expand what stands in brackets: `01-03` → 01, 02, 03. Raises `LaunchError`."""
    suffixes: list[str] = []
    for entry in text.split("\0"):
        low, _, high = entry.partition("-")
        first = bounded_number(low)
        last = bounded_number(high or low)
        if first is None or last is None or last < first:
            raise LaunchError(f"{where}: [{entry[:80]}] is not a list of numbers such as [1-3,07].")
        check_number(len(suffixes) + last - first + 1, where)
        # Leading zeros count: n[01-03] is n01, n02, n03.
        suffixes += [f"{suffix:0{len(low)}d}" for suffix in range(first, last + 1)]
    return suffixes


def check_number(hosts: int, where: str) -> None:
    """Raises `LaunchError` if a list has more hosts than there can be."""
    if hosts > MOST_HOSTS:
        raise LaunchError(f"{where}: these are {hosts} hosts or more; launch takes {MOST_HOSTS} at most.")


def bounded_number(text: str) -> int | None:
    """Read a whole number from 0 to `MOST`, in plain digits. None: `text` is not one."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > MOST:
        return None
    return int(text)


def host_key(name: str) -> str:
    """Return the name of a host without its domain and its network interface: two names of one host agree in it."""
    return INTERFACE.sub("", name.partition(".")[0])


def is_here(name: str) -> bool:
    """Say whether `name` is this host. Names are compared, with or without domain; no name server is asked."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own) or host_key(name) == host_key(own)


def free_port(first: int | None = None) -> int:
    """Find a TCP port of this host that nobody listens on.

    Args:
        first: the port to take if it is free.
    """
    candidates = [secrets.choice(PORTS) for _ in range(100)]
    # Port 0 lets the system choose, as a last resort: it may give the same port to an outgoing connection of another
    # process before rank 0 listens on it.
    for port in (first or secrets.choice(PORTS), *candidates, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise LaunchError("no port of this host is free")


def _add(listed: Hosts, entry: str, where: str) -> None:
    """Add the host of one entry to `listed`. A host that is there already gets one more slot. Raises `LaunchError`."""
    match = ENTRY.fullmatch(entry)
    if match is None:
        raise LaunchError(f"{where}: {entry!r} is not a host name, NAME:4, or NAME slots=4.")
    name = match[1]
    count = 0
    if match[3]:
        count = int(match[3])
    # A first entry without a number stays 0, which is not yet a slot: it may be a file without any slots.
    if name not in listed:
        listed[name] = count
        check_number(len(listed), where)
    else:
        listed[name] = max(listed[name], 1) + max(count, 1)


@dataclass(frozen=True)
class Job:
    """What a scheduler says about the job that this process is in.

    Attributes:
        scheduler: "flux", "slurm", "pbs", or "none" outside of a job.
        job_id: the scheduler's name for the job.
        hosts: names of the job's hosts, each once, in the scheduler's order.
        why: for each value that was found, the variable that it came from.
        tasks: number of tasks that the job asked for on each of `hosts`. Empty: it did not say.
        gpus_per_host: number of GPUs on each host. None: the scheduler does not say.
        hostfile: path of the scheduler's own file with each host once, if it wrote one.
        notes: what was found in the environment, and is not used: another job, other components of this one.
    """

    scheduler: str = "none"
    job_id: str = ""
    hosts: tuple[str, ...] = ()
    why: dict[str, str] = field(default_factory=dict)
    tasks: tuple[int, ...] = ()
    gpus_per_host: int | None = None
    hostfile: str | None = None
    notes: tuple[str, ...] = ()


def spread(total: int, limits: Sequence[int]) -> list[int]:
    """Spread `total` ranks over hosts, as evenly as their limits allow. The first hosts are filled first.

    The sum of the limits has to be at least `total`. 5 ranks with the limits 1, 4, 4: 1, 2, 2.
    """
    # An even share, rounded up. Where some hosts cannot hold it, the others have to hold more.
    left = total
    for index, limit in enumerate(sorted(limits)):
        most = -(-left // (len(limits) - index))
        if limit >= most:
            break
        left -= limit
    counts: list[int] = []
    for limit in limits:
        counts.append(min(most, limit, total - sum(counts)))
    return counts


def in_words(counts: Sequence[int], shown: int) -> str:
    """Say how many ranks hosts have: `4 a host`, or where they differ, the numbers of the first `shown` hosts."""
    if len(set(counts)) == 1:
        return f"{counts[0]} a host"
    some = " ".join(map(str, counts[:shown]))
    if len(counts) > shown:
        some += " …"
    return f"on these hosts {some}"
