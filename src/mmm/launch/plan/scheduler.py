"""Which job this process runs in, by the job's own environment; never by a command that happens to be on PATH.

    Slurm, then PBS, then none.

Where both have left their variables, Slurm's count: `sbatch` exports the environment it is called from, a PBS job's
included, while `qsub` exports nothing unless it is told to. The one that was not taken is named in `Job.notes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from mmm.errors import LaunchError
from mmm.launch.plan import pbs, slurm
from mmm.launch.plan.job import Job

SCHEDULERS = ("slurm", "pbs")


def detect(environ: Mapping[str, str] = os.environ, scheduler: str | None = None) -> Job:
    """The job of a process with this environment. `scheduler` ("slurm", "pbs", "none") leaves out all others.

    Raises:
        LaunchError: `scheduler` was asked for and has left no job here, or its variables or files cannot be read.
    """
    if scheduler == "none":
        return Job(why={"scheduler": "--scheduler none"})
    if scheduler is not None:
        job = {"slurm": slurm, "pbs": pbs}[scheduler].detect(environ)
        if job is None:
            needs = {"slurm": "SLURM_JOB_ID and SLURM_JOB_NODELIST", "pbs": "PBS_JOBID and PBS_NODEFILE"}[scheduler]
            raise LaunchError(f"--scheduler {scheduler}: this is not inside a job of it ({needs} are not set).")
        return job
    found = slurm.detect(environ)
    if found is None:
        found = pbs.detect(environ)
        halves = {"SLURM_JOB_ID": "SLURM_JOB_NODELIST", "PBS_JOBID": "PBS_NODEFILE"}
        half = next((f"{name}, but no {other}: no job" for name, other in halves.items() if environ.get(name)), None)
        return found or Job(why={"scheduler": half or "no SLURM_JOB_ID, no PBS_JOBID in the environment"})
    if environ.get("PBS_JOBID"):
        note = (
            f"PBS job {environ['PBS_JOBID']} is in the environment too, and not used: Slurm's job counts "
            "(--scheduler pbs if it should not)"
        )
        return replace(found, notes=(note,))
    return found
