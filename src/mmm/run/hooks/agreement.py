"""What has to be the same on every rank of a run, compared while the ranks meet (`mmm.runtime.agreement`)."""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mmm
from mmm.errors import DataError
from mmm.run.flags import flags, path_of
from mmm.run.hook import Hook, Loop
from mmm.run.run import Run
from mmm.runtime.agreement import agree, differences

# Digits of a hash that are compared, and shown.
DIGITS = 12


class Agreement(Hook):
    """Refuses a run whose ranks differ in what has to be the same, on every rank."""

    def meet(self, run: Run, store: dist.Store) -> None:
        agree(store, run.rank, shared_facts(run))

    def loop(self, run: Run, loop: Loop) -> None:
        """Compare what the batches have in common on all ranks, if they say it."""
        shared_facts_of_batches = getattr(loop.batches, "shared_facts", None)
        if shared_facts_of_batches is None:
            return
        by_rank = run.comm.gather_everywhere((socket.gethostname(), shared_facts_of_batches()))
        text = differences(by_rank)
        if text:
            raise DataError(text, on_every_rank=True)


def shared_facts(run: Run) -> dict[str, str]:
    """Name and value of everything that decides what this rank computes.

    Paths do not count, because hosts may keep the same files in different places; the name and the hash of the data do.
    """
    facts = {
        "program": run.name,
        "device": run.device.type,
        "data type": run.precision.name,
        "layout": str(run.layout),
        "torch": torch.__version__,
        "mmm": mmm.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    data = None if run.job is None else run.job.describe_data()
    if data is not None:
        facts["data"] = str(data.get("dataset", "unnamed"))
        digest = data.get("sha256")
        if digest:
            facts["data"] += f" (sha256 {str(digest)[:DIGITS]})"
    # The ranks of a host share its files: thousands of ranks would ask the file system at once.
    if run.rank.local_rank == 0:
        facts["program's file"] = main_digest()
    known = flags(run.config)
    for name, value in run.flags.items():
        # Hosts may have their files in different places.
        if known[name].make is not path_of:
            facts[f"--{name}"] = str(value)
    return facts


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
