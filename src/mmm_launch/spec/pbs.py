"""PBS (PBS Pro, OpenPBS, Torque): what a job finds in its environment."""

from collections.abc import Mapping

from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job


def detect(environ: Mapping[str, str]) -> Job | None:
    """The PBS job this process is in, or None. Raises `LaunchError`: in a job whose node file cannot be used.

    PBS_JOBID alone is not enough: only a job has the node file too. Each host stands in it as often as the chunk's
    `mpiprocs` says, once by default; the order of first appearance is kept.
    """
    if not environ.get("PBS_JOBID") or not environ.get("PBS_NODEFILE"):
        return None
    path = environ["PBS_NODEFILE"]
    listed = hosts.parse_file(path, "PBS_NODEFILE")
    why = {"scheduler": f"PBS_JOBID={environ['PBS_JOBID']}", "hosts": f"PBS_NODEFILE={path}"}
    tasks = tuple(max(count, 1) for count in listed.values()) if any(listed.values()) else ()
    if tasks:
        why["tasks"] = "PBS_NODEFILE, a line a rank"
    return Job(
        "pbs",
        environ["PBS_JOBID"],
        tuple(listed),
        why,
        tasks=tasks,
        hostfile=None if tasks else path,
    )
