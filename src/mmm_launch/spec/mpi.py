"""An MPI's mpiexec: which one it is, and its command line."""

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
    *("MMM_", "PYTHON", "PATH", "LD_", "VIRTUAL_ENV", "CONDA_", "TMPDIR", "XDG_"),
    *("OMP_", "MKL_", "KMP_", "TORCH", "TRITON_", "HF_", "WANDB_", "http_proxy", "https_proxy", "no_proxy"),
    *("NCCL_", "RCCL_", "GLOO_", "CCL_", "UCX_", "FI_"),
    *("CUDA_", "HIP_", "ROCR_", "HSA_", "ZE_", "ONEAPI_"),
)


def find(name: str | None, environ: Mapping[str, str]) -> str:
    """The mpiexec to use: `name`, or the first on PATH of mpiexec, mpirun. Raises `LaunchError`."""
    for each in [name] if name else ["mpiexec", "mpirun"]:
        if shutil.which(each, path=environ.get("PATH")):
            return each
    wanted = f"--mpiexec {name}: there is no such program" if name else "no mpiexec and no mpirun on PATH"
    raise LaunchError(
        f"{wanted}, and the ranks on the job's hosts are started by one.\n  Load the site's MPI module, "
        "give --mpiexec PATH, or run on this host alone: --scheduler none"
    )


def version_of(mpiexec: str) -> str:
    """What `mpiexec --version` prints. Raises `LaunchError`."""
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
    """The flavour in the text of `mpiexec --version`, and the words that tell it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for kind, pattern in PATTERNS.items():
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return kind, line
    return None, lines[0] if lines else "nothing"


def line(
    kind: str,
    mpiexec: str,
    hosts: Sequence[str],
    hostfile: str | None,
    env: Mapping[str, str],
    environ: Mapping[str, str],
) -> list[str]:
    """The words before the command that every process runs: one on each host. launch binds ranks, mpiexec does not.

    Args:
        hostfile: a file with exactly these hosts, each once.
        env: variables in the environment of mpiexec, which every rank gets. `ps` shows words to everybody.
        environ: launch's own environment.
    """
    if kind == "openmpi":
        slots = [f"{host}:1" for host in hosts]
        words = ["--host", ",".join(slots), "--map-by", "slot", "--bind-to", "none"]
        for name in carried(hosts, env, environ):
            words += ["-x", name]
    else:
        # hydra, and PALS, which spells some words in another way. Both pass their own environment on.
        words = ["-ppn", "1"]
        if hostfile is not None:
            words += ["-f" if kind == "hydra" else "--hostfile", hostfile]
        else:
            words += ["-hosts" if kind == "hydra" else "--hosts", ",".join(hosts)]
        if kind == "pals":
            words += ["--cpu-bind", "none"]
    return [mpiexec, "-n", str(len(hosts)), *words]


def carried(hosts: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """The variables that Open MPI is told to carry to other hosts."""
    names = list(env)
    if not all(map(is_here, hosts)):
        for name in sorted({*environ, AGENT_VARIABLE}):
            if name.startswith(CARRIED) and name not in env:
                names.append(name)
    return names
