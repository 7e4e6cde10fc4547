"""Files that say what machines there are, and what `launch` reads: hosts, node lists, programs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from fuzz_files.kinds import Kind
from mmm_lab.planner.machine_text import assumed, settings
from mmm_lab.planner.measured import machine_here
from mmm_lab.planner.network import peak_rate
from mmm_launch.errors import LaunchError
from mmm_launch.machines import find
from mmm_launch.machines.machine import read
from mmm_launch.program.preloads import preloads
from mmm_launch.program.target import Target, read_source
from mmm_launch.spec import hosts, slurm

BUILT_IN = ("perlmutter", "polaris")


def make_machine(folder: Path) -> None:
    (folder / "machine.json").write_bytes((find.BUILT_IN / "perlmutter.json").read_bytes())


def make_measured(folder: Path) -> None:
    (folder / "mmm").mkdir()
    about = json.loads((find.BUILT_IN / "laptop.json").read_text()) | {"hosts": 1}
    (folder / "mmm" / f"machine-{socket.gethostname()}.json").write_text(json.dumps(about))


def read_machine(folder: Path) -> Any:
    machine = read(folder / "machine.json").changed({"hosts": 2})
    return machine.bandwidth(2, True), peak_rate(machine, "bf16"), assumed(machine)


def read_measured(folder: Path) -> Any:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return machine_here("cpu", None, 1, 2, 2)


def make_launch_machines(folder: Path) -> None:
    for name in BUILT_IN:
        (folder / f"{name}.json").write_bytes((find.BUILT_IN / f"{name}.json").read_bytes())


def read_launch_machines(folder: Path) -> Any:
    environ = {find.VARIABLE: str(folder), "HOME": str(folder), "NERSC_HOST": "perlmutter"}
    machine, why = find.find(environ)
    print(machine, why)
    return machine.variables(), machine.srun_arguments(), settings(machine)


def make_hosts(folder: Path) -> None:
    (folder / "hosts").write_text("# ours\nn1 slots=4\nn2:4\nn3\nn3\n")


def read_hosts(folder: Path) -> Any:
    return hosts.parse_file(folder / "hosts")


def make_slurm(folder: Path) -> None:
    lines = [
        "SLURM_JOB_ID=7",
        "SLURM_JOB_NODELIST=n[01-03,7],gpu3",
        "SLURM_NTASKS=8",
        "SLURM_TASKS_PER_NODE=2(x3),1(x2)",
    ]
    (folder / "environ").write_text("\n".join([*lines, "SLURM_GPUS_ON_NODE=4", "SLURM_JOB_END_TIME=1700000000\n"]))


def read_slurm(folder: Path) -> Any:
    """Variables, which a file has for the sake of the fuzzer."""
    try:
        content = (folder / "environ").read_bytes()[: 1 << 17]
    except OSError:
        raise LaunchError("no variables") from None
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    environ = dict(line.split("=", 1) for line in lines if "=" in line)
    return slurm.detect(environ), slurm.cpus_of_a_node(environ)


def make_program(folder: Path) -> None:
    (folder / "train.py").write_text("# -*- coding: utf-8 -*-\nimport json\nfrom mmm.data import text\nimport helper\n"
                                     "if __name__ == '__main__':\n    import torch\n")  # fmt: skip
    (folder / "helper.py").write_text("try:\n    import numpy\nexcept ImportError:\n    pass\n")


def read_program(folder: Path) -> Any:
    return preloads(Target("script", str(folder / "train.py"))), read_source(folder / "helper.py")


KINDS = (
    Kind("plan-machine", make_machine, ("machine.json",), read_machine, sparse=True),
    Kind("plan-measured", make_measured, ("mmm/*.json",), read_measured, sparse=True),
    Kind("launch-machine", make_launch_machines, ("*.json",), read_launch_machines, sparse=True),
    Kind("hosts", make_hosts, ("hosts",), read_hosts, trusted=True),
    Kind("slurm-variables", make_slurm, ("environ",), read_slurm, trusted=True),
    Kind("program", make_program, ("*.py",), read_program, trusted=True),
)
