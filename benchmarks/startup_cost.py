"""What it costs to start ranks on this host, by each way there is: the whole command's seconds and CPU-seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from mmm_launch import contract
from mmm_launch.errors import LaunchError
from mmm_launch.spec import mpi

WAYS = ("forked", "spawned", "torchrun", "mpiexec")
# Of another launcher: a program started here is no rank of it.
FOREIGN = (
    *(name for names in contract.RANK_VARIABLES["torchrun"] for name in names),
    *("MASTER_ADDR", "MASTER_PORT", contract.STARTED_VARIABLE, contract.BEGAN_VARIABLE, contract.MARKER_VARIABLE),
)


@dataclass(frozen=True)
class Cost:
    """begin: when it was started, in seconds since 1970. seconds: of wall time. cpu: user and system CPU-seconds of the
    whole process tree. output: all it printed."""

    begin: float
    seconds: float
    cpu: float
    output: str


def run(command: Sequence[str], folder: str, extra: Mapping[str, str] | None = None) -> Cost:
    """Run `command` in `folder` to its end. The CPU time is that of the process and all that it has waited for.

    Raises:
        LaunchError: it failed; with the end of its output.
    """
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN} | dict(extra or {})
    with tempfile.TemporaryFile("w+") as output:
        begin, started = time.time(), time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environ
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if status:
        raise LaunchError(f"{' '.join(command)} failed ({process.returncode}):\n{text[-4000:]}")
    return Cost(begin, seconds, used.ru_utime + used.ru_stime, text)


def command(way: str, ranks: int, target: Sequence[str], mpiexec: str = "mpiexec") -> list[str]:
    """The command line that starts `target` (``-m MODULE …`` or ``SCRIPT …``) on `ranks` CPU ranks of this host."""
    python = sys.executable
    if way in ("forked", "spawned"):
        options = ["-n", str(ranks), "--device", "cpu", *(["--no-prefork"] if way == "spawned" else [])]
        return [python, "-m", "mmm_launch", *options, "python3", *target]
    if way == "torchrun":
        return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *target]
    flavour = mpi_flavour(mpiexec)
    options = ["--bind-to", "none", "--oversubscribe"] if flavour == "Open MPI" else []
    options += ["--allow-run-as-root"] if flavour == "Open MPI" and os.geteuid() == 0 else []
    return [mpiexec, *options, "-n", str(ranks), python, *target]


def mpi_flavour(mpiexec: str = "mpiexec") -> str | None:
    """``MPICH``, ``Open MPI``, or the first words of what it says of its version; None where there is no mpiexec."""
    if shutil.which(mpiexec) is None:
        return None
    try:
        kind, says = mpi.read_version(mpi.version_of(mpiexec))
    except LaunchError:
        return None
    return {"hydra": "MPICH", "openmpi": "Open MPI", "pals": "PALS"}.get(kind or "", says[:40])


class Start(NamedTuple):
    """Of one way and number of ranks: seconds until the last rank was there, and CPU-seconds in all."""

    seconds: float
    cpu: float


def start(way: str, ranks: int, program: Sequence[str], mpiexec: str, folder: str) -> Start:
    """Start a program that prints ``up RANKS TIME`` once its ranks have met, and see that all of them did.

    Raises:
        LaunchError: they did not.
    """
    cost = run(command(way, ranks, program, mpiexec), folder)
    up = [line.split()[1:] for line in cost.output.splitlines() if line.startswith("up ")]
    if len(up) != 1 or int(up[0][0]) != ranks:
        raise LaunchError(f"{way}: {ranks} ranks should have met, but what they said is: {cost.output}")
    return Start(float(up[0][1]) - cost.begin, cost.cpu)


def one_import(program: Sequence[str], repeats: int, folder: str) -> float:
    """CPU-seconds of a process that imports what every rank does, and ends: the median."""
    return median(run([sys.executable, *program, "import"], folder).cpu for _ in range(repeats))
