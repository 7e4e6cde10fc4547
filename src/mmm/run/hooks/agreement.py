"""What has to be the same on every rank of a run, compared while the ranks meet (`mmm.runtime.agreement`)."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mmm
from mmm.errors import DataError
from mmm.outside import expanded
from mmm.run.flags import flags
from mmm.run.hook import Hook
from mmm.run.run import Run
from mmm.runtime.agreement import agree, differences

_ONE_ENVIRONMENT = "Use one environment, and the same files of the program, on all hosts."
# What to do if a fact differs, by its name; "" is for all others.
ADVICE = {
    "": "Start every rank with the same command line.",
    "device": "Choose one with --device, or leave out the hosts that differ; `mmm doctor` says what a host has.",
    "data type": "Choose one with --dtype, or leave out the hosts that differ: auto goes by what a host's device has.",
    "data": "Give every host the same data: the same files (--data_dir, --text), or the same Python for its own text.",
    **dict.fromkeys(("torch", "Python", "mmm", "program's file"), _ONE_ENVIRONMENT),
}
BATCHES_ADVICE = {
    "": "Make the batches with the same arguments on every rank, but for the rank's place in the global batch.",
    "data": "Give every host the same files: a copy on a host may be an older one.",
}
# Digits of a hash that are compared, and shown.
DIGITS = 12


class Agreement(Hook):
    """Refuses a run whose ranks differ in what has to be the same, on every rank."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def before(self, run: Run) -> None:
        self.facts = shared_facts(run)

    def meet(self, run: Run, store: dist.Store) -> None:
        agree(store, run.rank, self.facts, ADVICE)

    def loop(self, run: Run) -> None:
        """Compare what the batches have in common on all ranks, if they say it."""
        shared_facts_of_batches = getattr(run.batches, "shared_facts", None)
        if shared_facts_of_batches is None:
            return
        by_rank = run.comm.gather_everywhere((socket.gethostname(), shared_facts_of_batches()))
        text = differences(by_rank, BATCHES_ADVICE)
        if text:
            raise DataError(text, on_every_rank=True)


def shared_facts(run: Run) -> dict[str, str]:
    """Name and value of everything that decides what this rank computes.

    Paths do not count, because hosts may keep the same files in different places; the name and the hash of the data do.
    Ranks of one host share their files, so only the first of them reads the source: thousands of ranks would ask the
    file system at once.
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
        facts["data"] = str(data.get("dataset", "unnamed"))
        digest = data.get("sha256")
        if digest:
            facts["data"] += f" (sha256 {str(digest)[:DIGITS]})"
    if run.rank.local_rank == 0:
        folder = Path(mmm.__file__).parent
        facts["mmm"] = f"{mmm.__version__} (files {source_digest(folder)})"
        facts["program's file"] = main_digest()
    known = flags(run.config)
    for name, value in run.flags.items():
        # Hosts may have their files in different places.
        if known[name].make is not expanded:
            facts[f"--{name}"] = str(value)
    return facts


def source_digest(folder: Path) -> str:
    """A hash of the Python files below `folder`, their names and contents: the first 12 digits of a sha256."""
    digest = hashlib.sha256()
    paths = []
    for parent, _, names in os.walk(folder):
        paths += [os.path.join(parent, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        # Hundreds of small files: pathlib and buffers would double the time.
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        name_in_folder = path.removeprefix(str(folder))
        # The length tells where a file ends and the next name begins.
        digest.update(f"{name_in_folder} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def main_digest() -> str:
    """Name and hash of the program's file. A program without one, such as that of ``python -c``, has none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return "none"
    path = Path(file)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "none"
    return f"{path.name} ({digest[:DIGITS]})"
