"""The scheduler's hosts, the network interfaces, and whether this host's name leads others to it."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mmm.cli.doctor.finding import Finding, Place
from mmm.launch.errors import LaunchError, MachineError
from mmm.launch.plan.scheduler import SCHEDULERS, detect
from mmm.machines import find

SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915  # asks for an interface's IPv4 address
FAST = ("hsn", "ib", "bond")  # names of the networks between a cluster's nodes
SHOWN = 6
Lookup = Callable[[str], list[str]]


def addresses_of(name: str) -> list[str]:
    """What a host's name resolves to; [] where it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def check_job(place: Place, lookup: Lookup = addresses_of) -> Iterator[Finding]:
    """The scheduler, its host file, and whether every host's name is known here."""
    try:
        job = detect(place.environ)
    except LaunchError as error:
        yield Finding("scheduler", "fail", str(error), "start a new job, or unset what another job has left")
        return
    if job.scheduler == "none":
        yield Finding("scheduler", "ok", "none: no job of PBS or Slurm, so `launch` starts ranks on this host")
        return
    shown = ", ".join(job.hosts[:SHOWN]) + (f" and {len(job.hosts) - SHOWN} more" if len(job.hosts) > SHOWN else "")
    yield Finding(
        "scheduler", "ok", f"{SCHEDULERS[job.scheduler].spoken}, {len(job.hosts)} hosts: {shown} ({job.why['hosts']})"
    )
    unknown = [host for host in job.hosts if not lookup(host)]
    if unknown:
        yield Finding(
            "hosts",
            "fail" if unknown[0] == job.hosts[0] else "warn",
            f"{len(unknown)} of {len(job.hosts)} names are not known here: {', '.join(unknown[:SHOWN])}",
            "set MASTER_ADDR to an address of the first host that the others can reach",
        )
    else:
        yield Finding("hosts", "ok", "every host's name is known here")


def check_machine(place: Place) -> Iterator[Finding]:
    """Which known machine this environment is of, what its file says, and whether all files of machines can be read."""
    try:
        machine, why = find.find(place.environ)
    except MachineError as error:
        yield Finding("machine", "fail", str(error), f"correct that file, or move it away; {find.VARIABLE} names files")
        return
    for line in find.old_places(place.environ):
        yield Finding("machine", "warn", line, f"{find.VARIABLE} names files and folders for launch, plan and doctor")
    if not machine.name:
        yield Finding("machine", "ok", f"none that is known: {why}")
        return
    seen = f"{machine.name} ({why}), {machine.file}: {machine.ranks_per_host or 'unknown'} devices a host"
    missing = machine.missing()
    rates = f"no {', '.join(missing)} for mmm plan" if missing else f"{machine.budget / 2**30:.1f} GiB of each to plan"
    yield Finding("machine", "ok", f"{seen}, {rates}")


def _several_hosts(place: Place) -> bool:
    try:
        return len(detect(place.environ).hosts) > 1
    except LaunchError:
        return True  # `check_job` says what is wrong; take the stricter case


def interfaces(root: Path = Path("/")) -> dict[str, str]:
    """Interface → its IPv4 address, "" without one. Those that are up."""
    found = {}
    for _, name in socket.if_nameindex():
        try:
            state = (root / "sys/class/net" / name / "operstate").read_text().strip()
        except OSError:
            state = "unknown"
        if state in ("up", "unknown"):
            found[name] = _address(name)
    return found


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = array.array("B", struct.pack("256s", name.encode()[:15]))
        try:
            fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:
            return ""
        return socket.inet_ntoa(request.tobytes()[20:24])


def check_interfaces(place: Place, found: dict[str, str] | None = None) -> Iterator[Finding]:
    """What is up and has an address; whether the variable that picks one names one of them."""
    found = interfaces(place.root) if found is None else found
    usable = {name: address for name, address in found.items() if address}
    seen = ", ".join(f"{name} {address}" for name, address in usable.items()) or "none has an address"
    several = _several_hosts(place)
    outside = [name for name, address in usable.items() if not ipaddress.ip_address(address).is_loopback]
    chosen = place.environ.get("GLOO_SOCKET_IFNAME")
    wrong = [name for name in (chosen or "").split(",") if name and name not in usable]
    fast = [name for name in outside if name.startswith(FAST)]
    if wrong:
        yield Finding(
            "interfaces",
            "fail",
            f"GLOO_SOCKET_IFNAME={chosen}, and {wrong[0]} has no address here; {seen}",
            f"export GLOO_SOCKET_IFNAME={(fast or outside or ['lo'])[0]}, or unset it",
        )
    elif not usable:
        yield Finding("interfaces", "fail", seen, "bring one up: ip link set lo up")
    elif not outside:
        yield Finding("interfaces", "warn" if several else "ok", seen, "no other host can be reached")
    elif several and fast and not chosen:
        yield Finding(
            "interfaces",
            "warn",
            seen,
            f"{fast[0]} is the fast one between hosts: "
            f"export GLOO_SOCKET_IFNAME={fast[0]} NCCL_SOCKET_IFNAME={','.join(fast)}",
        )
    else:
        yield Finding("interfaces", "ok", seen + (f"; GLOO_SOCKET_IFNAME={chosen}" if chosen else ""))


def check_host_name(
    place: Place, lookup: Lookup = addresses_of, name: str | None = None, found: dict[str, str] | None = None
) -> Iterator[Finding]:
    """Does this host's name resolve to an address of one of its interfaces that others can reach?

    gloo tells the other ranks to come to that address: if it is 127.0.0.1, ranks on other hosts end up at themselves.
    """
    name = socket.gethostname() if name is None else name
    found = interfaces(place.root) if found is None else found
    several = _several_hosts(place)
    outside = [each for each, address in found.items() if address and not ipaddress.ip_address(address).is_loopback]
    cure = (
        f"export GLOO_SOCKET_IFNAME={outside[0]} on every host, or fix /etc/hosts"
        if outside
        else "give the host an address in /etc/hosts or DNS"
    )
    if place.environ.get("GLOO_SOCKET_IFNAME"):
        cure = ""  # then gloo does not look for the name
    addresses = lookup(name)
    status = "warn" if several and cure else "ok"
    alone = "" if several else "fine for ranks on this host; for several hosts: "
    seen = f"{name} → {', '.join(addresses) or 'nothing'}"
    if not addresses:
        yield Finding("host name", status, seen, f"{alone}{cure}" if cure else "")
    elif all(ipaddress.ip_address(address).is_loopback for address in addresses):
        yield Finding("host name", status, f"{seen}: this host alone", f"{alone}{cure}" if cure else "")
    elif not any(address in found.values() or ":" in address for address in addresses):
        fix = f"ranks cannot listen there: {cure}" if cure else ""
        yield Finding("host name", "warn" if cure else "ok", f"{seen}: no interface here has that address", fix)
    else:
        yield Finding("host name", "ok", seen)
