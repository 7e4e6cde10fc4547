"""What has to be equal on every rank of a run, for `mmm.runtime.agreement`; and what each says of itself."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mmm
from mmm.layout import Layout
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_objects
from mmm.runtime.ranks import Rank

_ONE_ENVIRONMENT = "Use one environment, and the same files of the program, on all hosts."
ADVICE = {  # by fact; "": all others
    "": "Start every rank with the same command line.",
    "device": "Choose one with --device, or leave out the hosts that differ; `mmm doctor` says what a host has.",
    "data type": "Choose one with --dtype, or leave out the hosts that differ: auto goes by what a host's device has.",
    "data": "Give every host the same data: the same files (--data_dir, --text), or the same Python for its own text.",
    **dict.fromkeys(("torch", "Python", "mmm", "program's file"), _ONE_ENVIRONMENT),
}


def facts_of_run(
    module: str,
    options: Any,
    layout: Layout,
    device: torch.device,
    precision: Precision,
    data: Mapping[str, Any] | None,
    rank: Rank,
) -> dict[str, str]:
    """Name and value of everything that decides what this rank computes.

    Paths do not count, because hosts may keep the same files in different places: the data's name and hash do. Ranks of
    one host share their files, which its first rank alone reads: thousands of ranks would ask the file system at once.
    """
    facts = {
        "program": module,
        "device": device.type,
        "data type": precision.name,
        "layout": str(layout),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    if data is not None:
        digest = data.get("sha256")
        facts["data"] = f"{data.get('dataset', 'unnamed')}{f' (sha256 {str(digest)[:12]})' if digest else ''}"
    if rank.local_rank == 0:
        facts["mmm"] = f"{mmm.__version__} (files {source_digest(Path(mmm.__file__).parent)})"
        facts["program's file"] = main_digest()
    for field in dataclasses.fields(options):
        if "Path" not in str(field.type):
            facts[f"--{field.name}"] = str(getattr(options, field.name))
    return facts


def all_ranks(rank: Rank, device: torch.device, layout: Layout) -> list[dict[str, Any]]:
    """What every rank says of itself, by rank, on rank 0. A collective."""
    local = {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device),
    }
    return [{**about, **layout.coordinates(about["rank"])} for about in gather_objects(rank, local)]


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
