"""PBS (PBS Pro, OpenPBS, Torque): reads a job from its environment."""

from collections.abc import Mapping
from dataclasses import replace

from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job


def detect(environ: Mapping[str, str]) -> Job | None:
    """Return the PBS job that this process is in, or None outside of one.

    Each host stands in the node file as often as the chunk's `mpiprocs` says; by default once. Hosts keep the order in
    which they appear first.

    Raises:
        LaunchError: the job's node file cannot be used.
    """
    # PBS_JOBID is not enough, because users export it. Only a job has the node file too.
    if not environ.get("PBS_JOBID") or not environ.get("PBS_NODEFILE"):
        return None
    path = environ["PBS_NODEFILE"]
    listed = hosts.parse_file(path, "PBS_NODEFILE")
    why = {"scheduler": f"PBS_JOBID={environ['PBS_JOBID']}", "hosts": f"PBS_NODEFILE={path}"}
    job = Job("pbs", environ["PBS_JOBID"], tuple(listed), why)
    if not any(listed.values()):
        # Each host stands once in the file, so mpiexec can read it as it is.
        return replace(job, hostfile=path)
    why["tasks"] = "PBS_NODEFILE, a line a rank"
    tasks = tuple(max(count, 1) for count in listed.values())
    return replace(job, tasks=tasks)
