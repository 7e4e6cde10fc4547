"""Finds a machine by its name or by a job's environment, among the known ones and the user's own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mmm_launch.errors import MachineError, did_you_mean
from mmm_launch.machines.machine import Machine, read

BUILT_IN = Path(__file__).parent / "known"
# What may be printed on every machine: its `faults`.
EVERYWHERE = BUILT_IN.with_name("everywhere.json")
# Files and folders, separated as in PATH.
VARIABLE = "MMM_MACHINES"


def load(environ: Mapping[str, str]) -> dict[str, Machine]:
    """Read all machines, by their names in small letters. The user's own replace those that come with the package.

    Raises:
        MachineError: a file is wrong, or a file or folder that `VARIABLE` names does not exist.
    """
    # A later file with the same name of a machine replaces an earlier one.
    files = _files(BUILT_IN) + _files(_users(environ))
    for place in filter(None, environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(place).expanduser()
        if not path.exists():
            raise MachineError(f"{VARIABLE} names {place}, but there is no such file or folder.")
        files += _files(path)
    return {machine.name.lower(): machine for machine in map(read, files)}


def named(environ: Mapping[str, str], name: str) -> Machine:
    """Return the machine called `name`, in small or capital letters. Raises `MachineError`: there is none."""
    known = load(environ)
    if name.lower() not in known:
        hint = did_you_mean(name.lower(), known)
        others = f"There are {', '.join(known)}; {VARIABLE} and {_users(environ)} add others."
        raise MachineError(f"machine {name}: not known.{hint} {others}")
    return known[name.lower()]


def find(environ: Mapping[str, str], name: str | None = None) -> tuple[Machine, str]:
    """Find the machine called `name`, or without a name the one whose `match` fits this environment.

    Returns:
        The machine, and how it was found, in words. `Machine("")` if none fits.

    Raises:
        MachineError: there is no such machine, two machines fit, or a file is wrong.
    """
    if name is not None:
        return named(environ, name), "--site"
    fitting = []
    for machine in load(environ).values():
        for variable, pattern in machine.match.items():
            if variable in environ and re.search(pattern, environ[variable]):
                fitting.append((machine, f"{variable}={environ[variable]}"))
    names = {machine.name for machine, _ in fitting}
    if len(names) > 1:
        raise MachineError(f"this environment fits {' and '.join(sorted(names))}: choose one with --site NAME.")
    if fitting:
        return fitting[0]
    return Machine(""), "no variable of a known machine is set"


def _files(path: Path) -> list[Path]:
    """Return the file itself, or the files in a folder. A folder that does not exist has none."""
    if path.is_file():
        return [path]
    return sorted(path.glob("*.json"))


def _users(environ: Mapping[str, str]) -> Path:
    """Return the folder of the user's own machine files: ~/.config/mmm/machines."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    return Path(home).expanduser() / "mmm" / "machines"
