"""Slurm: what a job finds in its environment, and the `srun` line."""

import re
from collections.abc import Mapping, Sequence

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job, spread


def detect(environ: Mapping[str, str]) -> Job | None:
    """The Slurm allocation this process is in (the shell of `salloc`, the script of `sbatch`), or None.

    Raises `LaunchError`: a variable of Slurm's that cannot be read.
    """
    job = environ.get("SLURM_JOB_ID")
    listed = environ.get("SLURM_JOB_NODELIST")
    if not job or not listed:
        return None
    why = {"scheduler": f"SLURM_JOB_ID={job}", "hosts": f"SLURM_JOB_NODELIST={listed}"}
    names = tuple(hosts.expand(listed))
    tasks = _tasks(environ, len(names), why)
    gpus = _number(environ, "SLURM_GPUS_ON_NODE", why, "gpus_per_host")
    asked = re.fullmatch(r"(?:.*:)?(\d+)", environ.get("SLURM_GPUS_PER_NODE", ""))
    if gpus is None and asked:
        # Slurm keeps this one as it was typed: 4, or a100:4.
        gpus = int(asked[1])
        why["gpus_per_host"] = f"SLURM_GPUS_PER_NODE={asked[0]}"
    return Job(
        "slurm",
        job,
        names,
        why,
        tasks=tasks,
        gpus_per_host=gpus,
    )


def _tasks(environ: Mapping[str, str], nodes: int, why: dict[str, str]) -> tuple[int, ...]:
    """Tasks of each node where a number of tasks was asked for; else none. As srun has them in this environment.

    SLURM_NTASKS counts; SLURM_TASKS_PER_NODE beside it is a limit: `sbatch -n 1 --ntasks-per-node=2` leaves 1 and 2.
    Slurm sets SLURM_TASKS_PER_NODE also where no number was asked for.
    """
    total = _number(environ, "SLURM_NTASKS", why, "tasks")
    if total is None:
        each = _number(environ, "SLURM_NTASKS_PER_NODE", why, "tasks")
        return (each,) * nodes if each else ()
    limits = _per_node("SLURM_TASKS_PER_NODE", environ)
    if len(limits) != nodes or sum(limits) < total:
        limits = [total] * nodes
    return tuple(spread(total, limits)) if total else ()


def _per_node(name: str, environ: Mapping[str, str]) -> list[int]:
    """The numbers in a variable such as `4(x2),3`: 4, 4, 3. Raises `LaunchError`."""
    found: list[int] = []
    text = environ.get(name, "")
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise LaunchError(f"{name}={text[:80]} in the environment is no list of numbers such as 4(x2),3.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def cpus_of_a_node(environ: Mapping[str, str]) -> str | None:
    """The job's CPUs on each node; None where they differ: srun, not told a number, gives a task all of them."""
    each = set(_per_node("SLURM_JOB_CPUS_PER_NODE", environ))
    return environ.get("SLURM_CPUS_ON_NODE") if len(each) < 2 else None


def _number(environ: Mapping[str, str], name: str, why: dict[str, str], key: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,10}", text):
        raise LaunchError(f"{name}={text[:80]} in the environment is not a whole number.")
    why[key] = f"{name}={text}"
    return int(text)


def line(used: Sequence[str], is_subset: bool, environ: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """`srun` and its words before the command. launch binds ranks, srun does not.

    Args:
        is_subset: these are not all of the job's hosts.
        words: the site's own; none where it has none.
    """
    count = str(len(used))
    # All of launch's environment, also in a job that was submitted with --export=NONE.
    made = ["srun", "-N", count, "-n", count, "--export=ALL"]
    if is_subset:
        made.append(f"--nodelist={','.join(used)}")
    if not words:
        words = ["--ntasks-per-node=1"]
        cpus = cpus_of_a_node(environ)
        if cpus:
            words.append(f"--cpus-per-task={cpus}")
    return [*made, *words, "--cpu-bind=none"]
