"""Finds the job that this process runs in, by the job's environment variables: Flux's, Slurm's, then those of PBS.

A command such as `srun` on PATH says nothing about a job. Flux's broker may run inside a job of another scheduler, and
removes Slurm's variables: where it is there, it counts. Where both schedulers have left their variables, Slurm's
count: `sbatch` exports the environment in which it is called, with a PBS job's variables, while `qsub` exports nothing
unless it is told to. The job that was not taken is named in `Job.notes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from mmm_launch.errors import LaunchError
from mmm_launch.spec import flux, pbs, slurm
from mmm_launch.spec.hosts import Job


class Scheduler(NamedTuple):
    """A scheduler that launch knows.

    Attributes:
        spoken: its name in messages.
        variables: the variables that each of its jobs has. The first is the job's id, or its broker's address.
        detect: finds the job in an environment. None: there is none.
    """

    spoken: str
    variables: tuple[str, ...]
    detect: Callable[[Mapping[str, str]], Job | None]


# They are tried in this order. The first that has left a job in the environment counts.
SCHEDULERS = {
    # A Flux job has no other variable: its broker knows the rest.
    "flux": Scheduler(
        "Flux",
        ("FLUX_URI",),
        flux.detect,
    ),
    "slurm": Scheduler(
        "Slurm",
        ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
        slurm.detect,
    ),
    "pbs": Scheduler(
        "PBS",
        ("PBS_JOBID", "PBS_NODEFILE"),
        pbs.detect,
    ),
}


def detect(
    environ: Mapping[str, str] = os.environ,
    scheduler: str | None = None,
) -> Job:
    """Return the job of a process with this environment.

    Args:
        environ: the process's environment.
        scheduler: look only for this one's job, one of `SCHEDULERS`. "none": ignore all jobs. None: look for any.

    Raises:
        LaunchError: `scheduler` was asked for and has left no job here, or its variables or files cannot be read.
    """
    if scheduler == "none":
        return Job(why={"scheduler": "--scheduler none"})
    names = list(SCHEDULERS)
    if scheduler is not None:
        names = [scheduler]
    for name in names:
        job = SCHEDULERS[name].detect(environ)
        if job is None:
            continue
        notes = list(job.notes)
        for other, known in SCHEDULERS.items():
            # A user who has named a scheduler has chosen.
            if other == name or scheduler is not None:
                continue
            job_id = environ.get(known.variables[0])
            # Say that a second job is in the environment: the user may have meant that one.
            if job_id:
                notes.append(
                    f"{known.spoken} job {job_id} is in the environment too, and not used: --scheduler {other}"
                )
        return replace(job, notes=tuple(notes))
    # Ranks on this host only are not what the user has asked for.
    if scheduler is not None:
        raise LaunchError(f"--scheduler {scheduler}: this process is not inside a {scheduler} job.")
    missing = ", ".join(f"no {known.variables[0]}" for known in SCHEDULERS.values())
    return Job(why={"scheduler": f"{missing} in the environment"})
