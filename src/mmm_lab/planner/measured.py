"""Finds the machine that a run is on, if its rates are known: measured on this host, or from the machine's file."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from mmm_launch.machines.find import load
from mmm_launch.machines.machine import Machine, read


def measured_path() -> Path:
    """The file in which `mmm machine --measure` keeps what it measured on this host."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "mmm" / f"machine-{socket.gethostname()}.json"


def machine_here(
    device: str,
    site: str | None,
    hosts: int,
    ranks: int,
    threads: int = 1,
) -> Machine | None:
    """The machine that a run is on. None if its rates are not known.

    Args:
        device: type of the run's device.
        site: name of the machine; None if it is not known.
        hosts: number of hosts of the run.
        ranks: number of ranks of the run.
        threads: number of threads of a rank on a CPU. They are taken to be as many times as fast as one, which is
            optimistic.

    Raises:
        MachineError: the file is wrong, or has no rate for several hosts.
    """
    machine: Machine | None = None
    # What was measured on this host is better than the file of its machine, but knows no network.
    if hosts == 1 and measured_path().exists():
        machine = read(measured_path())
    elif site is not None:
        machine = load(os.environ).get(site.lower())
        if machine is not None and machine.missing():
            return None
    # A run on the CPUs of a GPU machine is not described by its file.
    if machine is None or machine.device != device:
        return None
    values: dict[str, Any] = {"hosts": hosts, "ranks_per_host": -(-ranks // hosts)}
    if device == "cpu" and threads > 1:
        values["peak_flops"] = {name: threads * rate for name, rate in machine.peak_flops.items()}
        values["memory_bandwidth"] = threads * machine.memory_bandwidth
        values["cores"] = -(-machine.cores // threads)
    return machine.changed(values)
