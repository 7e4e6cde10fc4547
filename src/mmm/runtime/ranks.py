"""Finds out which rank this process is, from what torchrun, ``launch``, an MPI or Slurm put into the environment.

Imports no torch: an error message asks for the rank, too, before anything heavy is loaded.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmm.errors import LaunchError
from mmm_launch.contract import (
    MARKER_VARIABLE,
    PORTS,
    RANK_VARIABLES,
    counts_of_nodes,
    first_set,
    numbering,
    unknown_numbering,
)

# The source of a rank that a dry run only stands in for (`mmm_lab.planner.dry_run`), and the variable that says so.
DRY_RUN = "dry run"
DRY_RUN_VARIABLE = "MMM_DRY_RUN"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Seconds that a collective may be given at most, a third of a year: PyTorch's own clock overflows some way above.
LONGEST = 1e7


@dataclass(frozen=True)
class Rank:
    """One process's place among all processes of the run.

    Attributes:
        rank: number of this process among all ranks, 0 ≤ rank < world_size.
        world_size: number of ranks on all hosts.
        local_rank: number of this process among the ranks of its host; None if unknown (`process_group.locate`).
        local_world_size: number of ranks on this host; None if unknown.
        source: who told us: ``launch``, ``alone``, or a name in `RANK_VARIABLES`; ``dry run`` for a rank that
            is only simulated.
        address: host name or address at which rank 0's store listens; None if this process runs alone.
        port: port at which rank 0's store listens; None if this process runs alone.
        store: the store by which the ranks have met; None before they meet.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    source: str
    address: str | None = None
    port: int | None = None
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes for all: rank 0, but never in a dry run, which leaves nothing behind."""
        return self.source != DRY_RUN and self.rank == 0


def read_number(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the first of the variables `names` that is set, and its value; None if none is set."""
    name = first_set(env, names)
    if name is None:
        return None
    try:
        return name, int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} in the environment is not a whole number") from None


def _slurm_local_world(env: Mapping[str, str]) -> int | None:
    """Ranks on this host from ``SLURM_STEP_TASKS_PER_NODE`` such as ``4(x2),3``; None if the variable is missing."""
    counts = counts_of_nodes(env.get("SLURM_STEP_TASKS_PER_NODE", "")) or []
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _master_address(env: Mapping[str, str], one_host: bool | None) -> tuple[str, int]:
    """Find the address and port at which rank 0 listens.

    Args:
        one_host: whether all ranks are on one host; None if unknown.
    """
    if "MASTER_PORT" in env:
        port = int(read_number(env, ("MASTER_PORT",))[1])  # type: ignore[index]
    else:
        # Ranks that one mpiexec started on one host share a parent: each computes the same port without asking.
        identity = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}.{os.getppid()}.{os.getuid()}"
        port = PORTS[zlib.crc32(identity.encode()) % len(PORTS)]
    address = env.get("MASTER_ADDR", "").strip("[]")
    if not address and one_host:
        address = "127.0.0.1"
    if not address or ("MASTER_PORT" not in env and not one_host):
        reason = "the ranks are on several hosts"
        if one_host is None:
            reason = "nothing says that the ranks are on one host"
        raise LaunchError(
            f"{reason} and MASTER_ADDR and MASTER_PORT are not both set: set them to a host name all hosts can reach "
            "(rank 0's) and a free port, such as MASTER_ADDR=node001 MASTER_PORT=29500"
        )
    return address, port


def whoami(env: Mapping[str, str] | None = None) -> Rank:
    """Return this process's place. A process that no launcher started as a rank runs alone: rank 0 of 1.

    Args:
        env: the environment variables to read; None: this process's own.

    Raises:
        LaunchError: the variables contradict each other, one is missing, or they are of an unknown launcher.
    """
    if env is None:
        env = os.environ
    source = numbering(env)
    if source is None:
        foreign = unknown_numbering(env)
        if foreign is not None:
            raise LaunchError(
                f"{foreign}={env[foreign]} says that some launcher has started this process as a rank, but that "
                f"launcher is unknown here, or does not say how many ranks there are: each rank would be a run of its "
                f"own. Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, start with `launch`, or, if this is not "
                f"a rank, unset {foreign}"
            )
        return Rank(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            source="alone",
        )
    variables = RANK_VARIABLES[source]
    rank_setting = read_number(env, variables.rank)
    world_setting = read_number(env, variables.world)
    assert rank_setting is not None
    rank_variable, rank = rank_setting
    if world_setting is None:
        raise LaunchError(
            f"{rank_variable}={rank} says this is a rank, but none of {', '.join(variables.world)} says how many "
            f"ranks there are: set WORLD_SIZE, RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `launch`"
        )
    world_variable, world_size = world_setting
    if not 0 <= rank < world_size:
        raise LaunchError(f"{rank_variable}={rank} is not between 0 and {world_variable}={world_size}, less one")

    # Other launchers set MPICH's variables as well, and tell the local numbers in their own.
    local_source = source
    if source == "mpich":
        local_source = _behind_pmi(env, rank, world_size) or source
    local_rank, local_world_size = _local_numbers(local_source, env, world_size)
    on_this_host = world_size == 1 or env.get("MASTER_ADDR") in LOOPBACK
    if local_world_size is None and on_this_host:
        local_world_size = world_size
    if local_rank is None and local_world_size is not None:
        local_rank = rank % max(local_world_size, 1)

    one_host = None
    if local_world_size is not None:
        one_host = local_world_size == world_size
    address, port = _master_address(env, one_host)

    # `launch` and a dry run set torchrun's variables, and mark that it was they.
    if source == "torchrun" and DRY_RUN_VARIABLE in env:
        source = DRY_RUN
    elif source == "torchrun" and MARKER_VARIABLE in env:
        source = "launch"
    return Rank(rank, world_size, local_rank, local_world_size, source, address, port)


def _behind_pmi(env: Mapping[str, str], rank: int, world_size: int) -> str | None:
    """Name the launcher that has set PMI_RANK and PMI_SIZE as MPICH's mpiexec does, and the rest under its own names.

    `srun --mpi=pmi2` does so, and Flux. None: it is MPICH's mpiexec.
    """
    if read_number(env, RANK_VARIABLES["mpich"].local_rank) is not None:
        return None
    if "SLURM_STEP_ID" in env and "SLURM_LOCALID" in env:
        return "slurm"
    flux = RANK_VARIABLES["flux"]
    flux_rank = read_number(env, flux.rank)
    flux_world = read_number(env, flux.world)
    # Inside a job of Flux's, an mpiexec may start ranks that are numbered otherwise than Flux's own tasks.
    if flux_rank and flux_world and flux_rank[1] == rank and flux_world[1] == world_size:
        return "flux"
    return None


def _local_numbers(
    source: str,
    env: Mapping[str, str],
    world_size: int,
) -> tuple[int | None, int | None]:
    """Local rank and local world size as the launcher `source` tells them; None for one that it does not tell."""
    variables = RANK_VARIABLES[source]
    rank_setting = read_number(env, variables.local_rank)
    world_setting = read_number(env, variables.local_world)
    local_rank = rank_setting[1] if rank_setting else None
    local_world_size = world_setting[1] if world_setting else None
    if source == "slurm":
        local_world_size = _slurm_local_world(env)
    if source == "flux" and env.get("FLUX_JOB_NNODES") == "1":
        local_world_size = world_size
    return local_rank, local_world_size


def command_line() -> list[str]:
    """Return the program and its arguments as a user types them: ``python3 -m mmm.examples.fsdp_tp --tp 4``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return ["python3", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return ["python3", *sys.argv]
