"""What has to be equal on every rank of a run, compared while the ranks meet (`mmm.runtime.agreement`)."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mmm
from mmm.run.hook import Hook
from mmm.run.options import flag_fields
from mmm.run.run import Run
from mmm.runtime.agreement import agree

_ONE_ENVIRONMENT = "Use one environment, and the same files of the program, on all hosts."
ADVICE = {  # by fact; "": all others
    "": "Start every rank with the same command line.",
    "device": "Choose one with --device, or leave out the hosts that differ; `mmm doctor` says what a host has.",
    "data type": "Choose one with --dtype, or leave out the hosts that differ: auto goes by what a host's device has.",
    "data": "Give every host the same data: the same files (--data_dir, --text), or the same Python for its own text.",
    **dict.fromkeys(("torch", "Python", "mmm", "program's file"), _ONE_ENVIRONMENT),
}


class Agreement(Hook):
    """Refuses a run whose ranks differ in what has to be equal, on every rank."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def before(self, run: Run) -> None:
        self.facts = shared_facts(run)

    def meet(self, run: Run, store: dist.Store) -> None:
        agree(store, run.rank, self.facts, ADVICE)


def shared_facts(run: Run) -> dict[str, str]:
    """Name and value of everything that decides what this rank computes.

    Paths do not count, because hosts may keep the same files in different places: the data's name and hash do. Ranks of
    one host share their files, which its first rank alone reads: thousands of ranks would ask the file system at once.
    """
    facts = {
        "program": run.name,
        "device": run.device.type,
        "data type": run.precision.name,
        "layout": str(run.layout),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    data = None if run.job is None else run.job.describe_data()
    if data is not None:
        digest = data.get("sha256")
        facts["data"] = f"{data.get('dataset', 'unnamed')}{f' (sha256 {str(digest)[:12]})' if digest else ''}"
    if run.rank.local_rank == 0:
        facts["mmm"] = f"{mmm.__version__} (files {source_digest(Path(mmm.__file__).parent)})"
        facts["program's file"] = main_digest()
    for field, value in flag_fields(run.config):
        if "Path" not in str(field.type):
            facts[f"--{field.name}"] = str(value)
    return facts


def source_digest(folder: Path) -> str:
    """Of the Python files below `folder`, their names and contents: the first 12 digits of a sha256."""
    digest, start = hashlib.sha256(), len(str(folder))
    for path in sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names):
        if path.endswith(".py"):
            with open(path, "rb", buffering=0) as file:  # pathlib and buffers would double the time
                content = file.read()
            digest.update(f"{path[start:]} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:12]


def main_digest() -> str:
    """Of the program that was started: its file's name and hash. A program without one, such as of ``-c``, has none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return f"{Path(file).name} ({hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]})" if file else "none"
    except OSError:
        return "none"
