"""Host names as people and schedulers write them: host files, comma lists, Slurm's `n[01-03,7]`; and this host; a
scheduler's job, which has hosts; and numbers of ranks, host after host.

python-hostlist reads the last of these three alone, and is a dependency more.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmm_launch.contract import PORTS
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
    """`a,b` or `a:4,b:4`, each host once. Raises `LaunchError`."""
    listed: Hosts = {}
    for word in text.split(","):
        _add(listed, word.strip(), f"--hosts {text}")
    return listed


def parse_file(path: str | Path, what: str = "--hostfile") -> Hosts:
    """A host file: a name a line, repeated once a slot (PBS), or with `slots=4` (Open MPI) or `:4` (MPICH) behind it.

    Empty lines and `#` comments are skipped. Raises `LaunchError`: no such file, no host in it, or a wrong line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{what} {path} cannot be read: {error}.") from None
    listed: Hosts = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            _add(listed, entry, f"{what} {path}, line {number}")
    if not listed:
        raise LaunchError(f"{what} {path} names no host.")
    return listed


def expand(text: str) -> list[str]:
    """The hosts in Slurm's compact form, in order: `n[1-2,07],gpu3` is n1, n2, n07, gpu3. Raises `LaunchError`."""
    names: list[str] = []
    # Split only at the commas outside of brackets.
    for word in re.split(r",(?![^\[]*\])", text.strip()):
        names += _expand_word(word)
    for name in names:
        if not NAME.fullmatch(name):
            raise LaunchError(f"host list {text[:80]!r}: {name[:80]!r} is not a host name, or [1-3,07] of numbers.")
    return names


def _expand_word(word: str) -> list[str]:
    """The names in a word with brackets. A word that cannot be read is left as it is."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", word)
    if match is None:
        return [word]
    head, inside, tail = match.groups()
    names: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        first = bounded_number(low)
        last = bounded_number(high or low)
        if first is None or last is None or last < first:
            return [word]
        for number in range(first, last + 1):
            names += _expand_word(f"{head}{number:0{len(low)}d}{tail}")
    return names


def bounded_number(text: str) -> int | None:
    """The whole number from 0 to `MOST` that `text` is, in plain digits; None: it is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) and int(text) <= MOST else None


def host_key(name: str) -> str:
    """What two names of one host have in common: no domain, and not which of its network interfaces is meant."""
    return INTERFACE.sub("", name.partition(".")[0])


def is_here(name: str) -> bool:
    """Is `name` this host? By its name, with or without domain; not by asking a name server."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own) or host_key(name) == host_key(own)


def free_port(first: int | None = None) -> int:
    """A TCP port of this host that nobody listens on.

    Args:
        first: the one to give where it is free.
    """
    # The system would give one that any connection of another process may take before rank 0 listens on it.
    for port in (first or secrets.choice(PORTS), *(secrets.choice(PORTS) for _ in range(100)), 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise LaunchError("no port of this host is free")


def _add(listed: Hosts, entry: str, where: str) -> None:
    """Add the host of one entry. Raises `LaunchError`."""
    match = ENTRY.fullmatch(entry)
    if match is None:
        raise LaunchError(f"{where}: {entry!r} is not a host name, NAME:4, or NAME slots=4.")
    name = match[1]
    count = 0
    if match[3]:
        count = int(match[3])
    listed[name] = max(listed[name], 1) + max(count, 1) if name in listed else count


@dataclass(frozen=True)
class Job:
    """What a scheduler says of the job this process is in; `scheduler` "none" where there is none.

    Attributes:
        hosts: in the scheduler's order, each once.
        why: for each value that was found, the variable it came from.
        tasks: what the job asked for on each of `hosts`; empty where it did not say.
        gpus_per_host: None where the scheduler does not say.
        hostfile: the scheduler's own file with each host once, if it wrote one.
        notes: what was also found, and not used.
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
    """`total` ranks over hosts, as evenly as the limits of the hosts allow, the first hosts filled first.

    The sum of the limits has to be at least `total`.
    """
    most = -(-total // len(limits))
    while sum(min(most, limit) for limit in limits) < total:
        most += 1
    counts: list[int] = []
    for limit in limits:
        counts.append(min(most, limit, total - sum(counts)))
    return counts


def in_words(counts: Sequence[int], shown: int) -> str:
    """`4 a host`; where they differ, the numbers of the first `shown` hosts."""
    if len(set(counts)) == 1:
        return f"{counts[0]} a host"
    some = " ".join(map(str, counts[:shown])) + (" …" if len(counts) > shown else "")
    return f"on these hosts {some}"
