"""The scheduler's hosts, and the machine that this is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mmm.units import counted
from mmm_lab.cli.doctor.finding import Finding
from mmm_launch.errors import LaunchError, MachineError
from mmm_launch.machines import find
from mmm_launch.spec.scheduler import SCHEDULERS, detect

SHOWN = 6  # hosts


def is_known(name: str) -> bool:
    """Does a host's name have an address here?"""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def check_job(outdir: Path, timeout: float, lookup: Callable[[str], bool] = is_known) -> Iterator[Finding]:
    """Look at the scheduler, its host file, and whether every host's name is known here."""
    try:
        job = detect(os.environ)
    except LaunchError as error:
        yield Finding("scheduler", "fail", str(error), "start a new job, or unset what another job has left")
        return
    if job.scheduler == "none":
        yield Finding("scheduler", "ok", "none: no job of PBS, Slurm or Flux, so `launch` starts ranks on this host")
        return
    hosts = f"{counted(len(job.hosts), 'host')}: {_first(job.hosts)} ({job.why['hosts']})"
    yield Finding("scheduler", "ok", f"{SCHEDULERS[job.scheduler].spoken}, {hosts}")
    # mpiexec and srun look the names up where they start.
    unknown = [host for host in job.hosts if not lookup(host)]
    if not unknown:
        yield Finding("hosts", "ok", "every host's name is known here")
        return
    # The ranks meet on the first host: without its name nothing starts.
    status = "fail" if unknown[0] == job.hosts[0] else "warn"
    seen = f"{len(unknown)} of {len(job.hosts)} names are not known here: {_first(unknown)}"
    yield Finding("hosts", status, seen, "set MASTER_ADDR to an address of the first host that the others can reach")


def _first(hosts: Sequence[str]) -> str:
    more = len(hosts) - SHOWN
    return ", ".join(hosts[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_machine(outdir: Path, timeout: float) -> Iterator[Finding]:
    """Say which known machine this environment belongs to, and whether all files of machines can be read."""
    try:
        machine, why = find.find(os.environ)
    except MachineError as error:
        yield Finding("machine", "fail", str(error), f"correct that file, or move it away; {find.VARIABLE} names files")
        return
    if not machine.name:
        yield Finding("machine", "ok", f"unknown: {why}")
        return
    # 0: its file does not say.
    devices = "unknown devices"
    if machine.ranks_per_host:
        devices = counted(machine.ranks_per_host, "device")
    yield Finding("machine", "ok", f"{machine.name} ({why}), {machine.file}: {devices} a host")
