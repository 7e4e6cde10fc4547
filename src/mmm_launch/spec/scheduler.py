"""Which job this process runs in, by the job's own environment; never by a command that happens to be on PATH.

    Slurm, then PBS, then none.

Where both have left their variables, Slurm's count: `sbatch` exports the environment it is called from, a PBS job's
included, while `qsub` exports nothing unless it is told to. The one that was not taken is named in `Job.notes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from mmm_launch.errors import LaunchError
from mmm_launch.spec import pbs, slurm
from mmm_launch.spec.hosts import Job


class Scheduler(NamedTuple):
    """spoken: its name in messages. variables: which all its jobs have, that of the job's id first."""

    spoken: str
    variables: tuple[str, str]
    detect: Callable[[Mapping[str, str]], Job | None]


# The first that has left a job counts.
SCHEDULERS = {
    "slurm": Scheduler("Slurm", ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"), slurm.detect),
    "pbs": Scheduler("PBS", ("PBS_JOBID", "PBS_NODEFILE"), pbs.detect),
}


def detect(environ: Mapping[str, str] = os.environ, scheduler: str | None = None) -> Job:
    """The job of a process with this environment. `scheduler` (one of `SCHEDULERS`, "none") leaves out all others.

    Raises:
        LaunchError: `scheduler` was asked for and has left no job here, or its variables or files cannot be read.
    """
    if scheduler == "none":
        return Job(why={"scheduler": "--scheduler none"})
    for name in [scheduler] if scheduler else SCHEDULERS:
        job = SCHEDULERS[name].detect(environ)
        if job is None:
            continue
        notes = []
        for other, known in SCHEDULERS.items():
            job_id = environ.get(known.variables[0])
            if job_id and other != name and scheduler is None:
                notes.append(
                    f"{known.spoken} job {job_id} is in the environment too, and not used: --scheduler {other}"
                )
        return replace(job, notes=tuple(notes))
    if scheduler is not None:
        raise LaunchError(f"--scheduler {scheduler}: this is not inside a job of it.")
    missing = ", ".join(f"no {known.variables[0]}" for known in SCHEDULERS.values())
    return Job(why={"scheduler": f"{missing} in the environment"})
