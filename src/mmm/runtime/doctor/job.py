"""The job this runs in, if any: scheduler and hosts, from the variables and files that the scheduler itself sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmm.errors import LaunchError


@dataclass(frozen=True)
class Job:
    """scheduler: ``slurm``, ``pbs`` or ``none``. hosts: in order, each once. why: where "hosts" came from."""

    scheduler: str = "none"
    hosts: tuple[str, ...] = ()
    why: dict[str, str] = field(default_factory=dict)


def detect(environ: Mapping[str, str]) -> Job:
    """The job by its environment: Slurm's, which a job of PBS may have submitted; else that of PBS.

    Raises:
        LaunchError: the list of hosts cannot be read, or names none.
    """
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        text = environ["SLURM_JOB_NODELIST"]
        return _job("slurm", expand(text), f"SLURM_JOB_NODELIST={text}")
    if environ.get("PBS_JOBID") and environ.get("PBS_NODEFILE"):
        path = environ["PBS_NODEFILE"]
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise LaunchError(f"PBS_NODEFILE={path} cannot be read: {error.strerror}") from None
        return _job("pbs", [line.strip() for line in lines], f"PBS_NODEFILE={path}")
    return Job()


def _job(scheduler: str, names: list[str], source: str) -> Job:
    hosts = tuple(dict.fromkeys(name for name in names if name))
    if not hosts:
        raise LaunchError(f"{source} names no host")
    return Job(scheduler, hosts, {"hosts": source})


def expand(text: str) -> list[str]:
    """Slurm's short form of a list of hosts: ``a[1-2,07]b,c`` → a1b, a2b, a07b, c."""
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        made = [""]
        for i, part in enumerate(re.split(r"\[([^\]]*)\]", item)):   # text, range, text, range, …, text
            made = [name + each for name in made for each in (_range(part) if i % 2 else [part])]
        names += [name for name in made if name]
    return names


def _range(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdigit() and last.isdigit():
            found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        else:
            found.append(part)
    return found
