"""Finds the mpiexec of an MPI, tells its kind, and makes its command line."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from mmm_launch.errors import LaunchError
from mmm_launch.spec.hosts import is_here

# JSON for the agents: where they find launch, and the run's token. {"at": [[address, port], …], "token": …, …}
AGENT_VARIABLE = "MMM_CLUSTER"
PATTERNS = {"openmpi": r"open ?mpi|openrte|prrte", "hydra": r"hydra|mpich|intel\(r\) mpi", "pals": r"\bpals\b"}
FLAVOURS = tuple(PATTERNS)
# Seconds. An mpiexec on a busy file system is slow to start.
VERSION_TIMEOUT = 20.0

# Open MPI carries no variable to other hosts unless told to. These prefixes are what programs read; launch's own values
# come over launch's own connection.
CARRIED = (
    # Where programs and Python find their files.
    *("MMM_", "PYTHON", "PATH", "LD_", "VIRTUAL_ENV", "CONDA_", "TMPDIR", "XDG_"),
    # Threads, and the libraries that a training program uses.
    *("OMP_", "MKL_", "KMP_", "TORCH", "TRITON_", "HF_", "WANDB_", "http_proxy", "https_proxy", "no_proxy"),
    # Communication libraries.
    *("NCCL_", "RCCL_", "GLOO_", "CCL_", "UCX_", "FI_"),
    # Accelerators.
    *("CUDA_", "HIP_", "ROCR_", "HSA_", "ZE_", "ONEAPI_"),
)


def find(name: str | None, environ: Mapping[str, str]) -> str:
    """Find the mpiexec to use: `name`, or else the first of mpiexec and mpirun on PATH. Raises `LaunchError`."""
    programs = ["mpiexec", "mpirun"]
    problem = "there is no mpiexec and no mpirun on PATH"
    if name:
        programs = [name]
        problem = f"--mpiexec {name}: there is no such program"
    for program in programs:
        if shutil.which(program, path=environ.get("PATH")):
            return program
    raise LaunchError(
        f"{problem}, and launch needs one to start ranks on the job's hosts.\n  Load the site's MPI module, "
        "give --mpiexec PATH, or run on this host only: --scheduler none"
    )


def version_of(mpiexec: str) -> str:
    """Run `mpiexec --version` and return what it prints, on stdout and stderr. Raises `LaunchError`."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{mpiexec} --version does not run: {error}") from None
    return f"{done.stdout}\n{done.stderr}"


def read_version(text: str) -> tuple[str | None, str]:
    """Find the kind of MPI in the text of `mpiexec --version`, and the line that tells it. None: it is not known."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for kind, pattern in PATTERNS.items():
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return kind, line
    if not lines:
        return None, "nothing"
    return None, lines[0]


def line(
    kind: str,
    mpiexec: str,
    hosts: Sequence[str],
    hostfile: str | None,
    env: Mapping[str, str],
    environ: Mapping[str, str],
) -> list[str]:
    """Make the part of mpiexec's command line that stands before the command. It starts one agent on each host.

    Args:
        kind: "openmpi", "hydra" or "pals".
        mpiexec: name or path of the program.
        hostfile: path of a file with exactly these hosts, each once.
        env: variables of --env, which are in the environment of mpiexec. Only their names are on the command line:
            `ps` shows that to everybody.
        environ: launch's own environment.
    """
    if kind == "openmpi":
        # One slot a host, so that there is one agent on each. Open MPI would bind the agent to one core, and all
        # ranks of the host with it: launch binds ranks itself.
        slots = [f"{host}:1" for host in hosts]
        options = ["--host", ",".join(slots), "--map-by", "slot", "--bind-to", "none"]
        for name in carried(hosts, env, environ):
            options += ["-x", name]
    else:
        # Hydra (MPICH, Intel MPI), and PALS (HPE Cray), whose options have other names. Both pass their own
        # environment on to all hosts.
        file_option = "--hostfile"
        list_option = "--hosts"
        if kind == "hydra":
            file_option = "-f"
            list_option = "-hosts"
        options = ["-ppn", "1"]
        if hostfile is not None:
            options += [file_option, hostfile]
        else:
            options += [list_option, ",".join(hosts)]
        # PALS binds each process to CPUs unless told not to. The ranks would share the agent's.
        if kind == "pals":
            options += ["--cpu-bind", "none"]
    return [mpiexec, "-n", str(len(hosts)), *options]


def carried(hosts: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that Open MPI is told to carry to other hosts."""
    names = list(env)
    if not all(map(is_here, hosts)):
        for name in sorted({*environ, AGENT_VARIABLE}):
            if name.startswith(CARRIED) and name not in env:
                names.append(name)
    return names
