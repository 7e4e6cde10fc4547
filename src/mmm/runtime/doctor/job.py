"""The job this runs in, if any: scheduler and hosts, from the variables and files that the scheduler itself sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """scheduler: ``PBS``, ``Slurm`` or None. hosts: in order, each once. source: where they came from. problem: what
    is wrong with that."""

    scheduler: str | None = None
    hosts: tuple[str, ...] = ()
    source: str = ""
    problem: str = ""


def detect(environ: Mapping[str, str]) -> Job:
    """The job by its environment. One that says PBS and Slurm is the one that has a list of hosts, PBS first."""
    if "PBS_JOBID" in environ or "PBS_NODEFILE" in environ:
        path = environ.get("PBS_NODEFILE")
        if path is None:
            return Job("PBS", problem="PBS_JOBID is set, but PBS_NODEFILE is not: hosts unknown")
        try:
            hosts = tuple(dict.fromkeys(line.strip() for line in Path(path).read_text().splitlines() if line.strip()))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            return Job("PBS", (), f"PBS_NODEFILE={path}", f"PBS_NODEFILE={path} cannot be read: {why}")
        return Job("PBS", hosts, f"PBS_NODEFILE={path}", "" if hosts else f"PBS_NODEFILE={path} names no host")
    if "SLURM_JOB_ID" in environ:
        text = environ.get("SLURM_JOB_NODELIST", "")
        hosts = tuple(dict.fromkeys(expand(text)))
        problem = "" if hosts else f"SLURM_JOB_NODELIST={text!r} names no host"
        return Job("Slurm", hosts, f"SLURM_JOB_NODELIST={text}", problem)
    return Job()


def expand(text: str) -> list[str]:
    """Slurm's short form of a list of hosts: ``a[1-2,07]b,c`` → a1b, a2b, a07b, c."""
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)                      # text, range, text, range, …, text
        made = [""]
        for i, part in enumerate(parts):
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
