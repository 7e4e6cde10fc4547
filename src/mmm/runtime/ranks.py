"""Who am I? A rank's place, read from what torchrun, ``launch``, an MPI or Slurm put into the environment.

Imports no torch: it is also what an error message asks before anything heavy is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmm.errors import LaunchError
from mmm.runtime.contract import (
    DRY_RUN_VARIABLE,
    LOOPBACK,
    MARKER_VARIABLE,
    RANK_VARIABLES,
    numbering,
    port_of,
    read_number,
)

DRY_RUN = "dry run"  # the source of a rank that is not there (`mmm_lab.planner.dry_run`)
LONGEST = 1e7  # s that a collective may be given, a third of a year: PyTorch's own clock overflows some way above


@dataclass(frozen=True)
class Rank:
    """One process's place among all of the run's.

    Attributes:
        rank, world_size: over all hosts, 0 ≤ rank < world_size.
        local_rank, local_world_size: the same on this host; None where nothing says them (`process_group.locate`).
        source: what told us: ``launch``, ``alone``, or its name in `contract.RANK_VARIABLES`; ``dry run`` for a rank
            that is not there.
        address, port: where rank 0's store listens; None where this process is alone.
        store: by which the ranks have met; None before.
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
        """Whether this one prints and writes for all: rank 0, but in a dry run, which leaves nothing behind, none."""
        return self.rank == 0 and self.source != DRY_RUN


def _slurm_local_world(env: Mapping[str, str]) -> int | None:
    """Ranks on this host from ``SLURM_STEP_TASKS_PER_NODE`` such as ``4(x2),3``; None where it does not say."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        number, _, times = part.partition("(x")
        if number.isdigit():
            counts += [int(number)] * int(times.rstrip(")") or 1)
    node = int(env.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _master_address(env: Mapping[str, str], one_host: bool | None) -> tuple[str, int]:
    """Where rank 0 listens. On one host, ranks of one mpiexec share a parent, and so can agree on a port unasked.

    Args:
        one_host: whether all ranks are on one; None where nothing says it.
    """
    if "MASTER_PORT" in env:
        port = int(read_number(env, ("MASTER_PORT",))[1])  # type: ignore[index]
    else:
        identity = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}.{os.getppid()}.{os.getuid()}"
        port = port_of(identity)
    address = env.get("MASTER_ADDR", "").strip("[]") or ("127.0.0.1" if one_host else None)
    if address is None or ("MASTER_PORT" not in env and not one_host):
        raise LaunchError(
            f"{'nothing says that the ranks are on one host' if one_host is None else 'the ranks are on several hosts'}"
            " and MASTER_ADDR and MASTER_PORT are not both set: set them to a host name all hosts can reach (rank 0's) "
            "and a free port, such as MASTER_ADDR=node001 MASTER_PORT=29500"
        )
    return address, port


def whoami(env: Mapping[str, str] | None = None) -> Rank:
    """This process's place. A process that nothing started as a rank is alone: rank 0 of 1.

    Raises:
        LaunchError: the variables contradict each other, one is missing, or they are of a launcher that is not known.
    """
    env = os.environ if env is None else env
    name = numbering(env)
    if name is None:
        return Rank(0, 1, 0, 1, "alone")
    source = RANK_VARIABLES[name]
    rank, world = read_number(env, source.rank), read_number(env, source.world)
    assert rank is not None
    if world is None:
        raise LaunchError(
            f"{rank[0]}={rank[1]} says this is a rank, but none of {', '.join(source.world)} says of how many: "
            f"set WORLD_SIZE, RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `launch`"
        )
    if not 0 <= rank[1] < world[1]:
        raise LaunchError(f"{rank[0]}={rank[1]} is not between 0 and {world[0]}={world[1]}, less one")
    beside = _behind_pmi(env, rank[1], world[1]) if name == "mpich" else None
    local, local_world = _local_numbers(beside or name, env, world[1])
    if local_world is None and (world[1] == 1 or env.get("MASTER_ADDR") in LOOPBACK):
        local_world = world[1]
    if local is None and local_world is not None:
        local = rank[1] % max(local_world, 1)
    address, port = _master_address(env, one_host=None if local_world is None else local_world == world[1])
    if name == "torchrun" and DRY_RUN_VARIABLE in env:
        name = DRY_RUN
    elif name == "torchrun" and MARKER_VARIABLE in env:
        name = "launch"
    return Rank(rank[1], world[1], local, local_world, name, address, port)


def _behind_pmi(env: Mapping[str, str], rank: int, world: int) -> str | None:
    """Who has set PMI_RANK and PMI_SIZE as MPICH's mpiexec does, and leaves the rest to names of its own.

    `srun --mpi=pmi2` does, and Flux.
    """
    if read_number(env, RANK_VARIABLES["mpich"].local_rank) is not None:
        return None
    if "SLURM_STEP_ID" in env and "SLURM_LOCALID" in env:
        return "slurm"
    flux = RANK_VARIABLES["flux"]
    own = [read_number(env, flux.rank), read_number(env, flux.world)]
    return "flux" if [number and number[1] for number in own] == [rank, world] else None


def _local_numbers(name: str, env: Mapping[str, str], world: int) -> tuple[int | None, int | None]:
    """Local rank and local world size by launcher `name`; None where it does not say."""
    local, local_world = (read_number(env, names) for names in RANK_VARIABLES[name][2:])
    size = local_world[1] if local_world else None
    if name == "slurm":
        size = _slurm_local_world(env)
    if name == "flux" and env.get("FLUX_JOB_NNODES") == "1":
        size = world
    return local[1] if local else None, size


def command_line() -> list[str]:
    """The program and its arguments as a user would type them: ``python3 -m mmm.examples.fsdp_tp --tpsize 4``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return ["python3", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return ["python3", *sys.argv]
