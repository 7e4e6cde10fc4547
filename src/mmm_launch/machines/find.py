"""Which machine: by its name, by a job's environment, or the one that a run is on; known ones and the user's own."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmm_launch.errors import MachineError, did_you_mean
from mmm_launch.machines.machine import Machine, read

BUILT_IN = Path(__file__).parent / "known"
VARIABLE = "MMM_MACHINES"  # files and folders, as in PATH


def load(environ: Mapping[str, str]) -> dict[str, Machine]:
    """All machines, by their names in small letters. The user's own replace those that come with the package.

    Raises:
        MachineError: a file is wrong, or a file or folder that `VARIABLE` names is not there.
    """
    files = _files(BUILT_IN) + _files(_users(environ))
    for place in filter(None, environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(place).expanduser()
        if not path.exists():
            raise MachineError(f"{VARIABLE} names {place}, and there is no such file or folder.")
        files += _files(path)
    return {machine.name.lower(): machine for machine in map(read, files)}


def named(environ: Mapping[str, str], name: str) -> Machine:
    """The machine called `name`, in any letters. Raises MachineError: there is none, or a file is wrong."""
    known = load(environ)
    if name.lower() not in known:
        hint = did_you_mean(name.lower(), known)
        others = f"There are {', '.join(known)}; {VARIABLE} and {_users(environ)} add others."
        raise MachineError(f"machine {name}: not known.{hint} {others}")
    return known[name.lower()]


def find(environ: Mapping[str, str], name: str | None = None) -> tuple[Machine, str]:
    """The machine called `name`, or the one whose `match` this environment fits, and why; `Machine("")` if there is
    none.

    Raises:
        MachineError: no such machine, two that fit, or a file that is wrong.
    """
    if name is not None:
        return named(environ, name), "--site"
    fitting: dict[str, tuple[Machine, str]] = {}
    for machine in load(environ).values():
        for variable, pattern in machine.match.items():
            if variable in environ and re.search(pattern, environ[variable]):
                fitting.setdefault(machine.name, (machine, f"{variable}={environ[variable]}"))
    if len(fitting) > 1:
        both = " and ".join(f"{machine.name} ({why})" for machine, why in fitting.values())
        raise MachineError(f"this environment fits {both}: say which with --site NAME.")
    return next(iter(fitting.values())) if fitting else (Machine(""), "no known machine's variables in the environment")


def measured_path() -> Path:
    """Where `mmm machine --measure` keeps what it measures of this host."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "mmm" / f"machine-{socket.gethostname()}.json"


def machine_here(device: str, site: str | None, hosts: int, ranks: int, threads: int = 1) -> Machine | None:
    """The machine that a run is on, as far as its rates are known: measured on this host, or by the machine's file.

    Args:
        device: type of the run's device. site: name of a machine, None where it is not known. ranks: of the run.
        threads: of a rank on a CPU: so many times the rate of one, which is optimistic.

    Raises:
        MachineError: the file is wrong, or has no rate for several hosts.
    """
    path = measured_path()
    if hosts == 1 and os.path.exists(path):
        machine = read(path)
    elif site is None or (known := load(os.environ).get(site.lower())) is None or known.missing():
        return None
    else:
        machine = known
    if machine.device != device:
        return None
    values: dict[str, Any] = {"hosts": hosts, "ranks_per_host": -(-ranks // hosts)}
    if device == "cpu" and threads > 1:
        values["peak_flops"] = {name: threads * rate for name, rate in machine.peak_flops.items()}
        values |= {"memory_bandwidth": threads * machine.memory_bandwidth, "cores": -(-machine.cores // threads)}
    return machine.changed(values)


def _files(path: Path) -> list[Path]:
    """The file itself, or those of a folder. A folder that is not there has none."""
    if path.is_file():
        return [path]
    return sorted(path.glob("*.json"))


def _users(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    return Path(home).expanduser() / "mmm" / "machines"
