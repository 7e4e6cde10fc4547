"""Slurm: what a job finds in its environment, and the `srun` line."""

import re
from collections.abc import Mapping, Sequence

from mmm.errors import LaunchError
from mmm.launch.job import hosts
from mmm.launch.job.mpi import Request
from mmm.launch.job.scheduler import Job


def detect(environ: Mapping[str, str]) -> Job | None:
    """The Slurm allocation this process is in (the shell of `salloc`, the script of `sbatch`), or None.

    Raises `LaunchError`: a variable of Slurm's that cannot be read.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    name = next((n for n in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(n)), None)
    if not job or name is None:
        return None
    why = {"scheduler": f"SLURM_JOB_ID={job}", "hosts": f"{name}={environ[name]}"}
    tasks = _number(environ, "SLURM_NTASKS_PER_NODE", why, "tasks_per_host")
    gpus = _number(environ, "SLURM_GPUS_ON_NODE", why, "gpus_per_host")
    asked = re.fullmatch(r"(?:.*:)?(\d+)", environ.get("SLURM_GPUS_PER_NODE", ""))
    if gpus is None and asked:
        gpus = int(asked[1])  # as typed: 4, a100:4
        why["gpus_per_host"] = f"SLURM_GPUS_PER_NODE={asked[0]}"
    return Job(
        "slurm",
        job,
        tuple(hosts.expand(environ[name])),
        why,
        tasks_per_host=_tasks(environ, why) if tasks is None else tasks,
        gpus_per_host=gpus,
        end_time=_number(environ, "SLURM_JOB_END_TIME", why, "end_time"),
    )


def _tasks(environ: Mapping[str, str], why: dict[str, str]) -> int | None:
    """Tasks a node where a number of tasks was asked for. Slurm sets SLURM_TASKS_PER_NODE even where none was."""
    text = environ.get("SLURM_TASKS_PER_NODE")
    if not text or not environ.get("SLURM_NTASKS"):
        return None
    counts = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", text)]
    why["tasks_per_host"] = f"SLURM_TASKS_PER_NODE={text}" + (": the least, on each" if len(set(counts)) > 1 else "")
    return min(counts, default=None)


def _number(environ: Mapping[str, str], name: str, why: dict[str, str], key: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdigit():
        raise LaunchError(f"{name}={text} in the environment is not a whole number.")
    why[key] = f"{name}={text}"
    return int(text)


def line(request: Request, words: Sequence[str]) -> list[str]:
    """`srun` and its words before the command. `words`: the site's own, or how tasks share a host.

    srun hands its own environment on (--export=ALL); launch puts `--env` there.
    """
    made = ["srun", "-N", str(len(request.hosts)), "-n", str(request.processes)]
    if request.subset:
        made.append(f"--nodelist={','.join(request.hosts)}")
    if request.env:
        made.append("--export=ALL")
    return [*made, *words, *request.bind, *request.more]
