"""Slurm: reads a job from its environment, and makes the command line of `srun`."""

import re
from collections.abc import Mapping, Sequence

from mmm_launch.contract import counts_of_nodes
from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job, spread

# Variables with the hosts of each component of a heterogeneous job, 0, 1, …
COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_"
# With one of these srun gives a task the GPUs of one rank. Its task on a host is the agent of all ranks there.
OF_A_TASK = (
    *("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"),
    *("SLURM_GPU_BIND", "SLURM_TRES_BIND"),
)


def detect(environ: Mapping[str, str]) -> Job | None:
    """Return the Slurm allocation that this process is in: the shell of `salloc`, or the script of `sbatch`.

    Returns:
        The job, or None outside of one.

    Raises:
        LaunchError: a variable of Slurm's cannot be read.
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
    return Job("slurm", job, names, why, tasks, gpus, notes=_other_components(environ, why))


def _other_components(environ: Mapping[str, str], why: dict[str, str]) -> tuple[str, ...]:
    """Say which hosts of a heterogeneous job are not used: the variables without a number are of its first component.

    Source: https://slurm.schedmd.com/heterogeneous_jobs.html, "Environment Variables".
    """
    components = _number(environ, "SLURM_HET_SIZE", why, "components") or 1
    if components == 1:
        return ()
    unused = []
    for name in sorted(environ):
        if name.startswith(COMPONENT) and name != f"{COMPONENT}0":
            unused.append(environ[name])
    return (
        f"SLURM_HET_SIZE={components}: launch uses only the first component of this heterogeneous job. Not used: "
        f"{', '.join(unused)}. To use these hosts too, submit them as one component: without `:` between options of "
        "sbatch, and without `#SBATCH hetjob`",
    )


def _tasks(environ: Mapping[str, str], nodes: int, why: dict[str, str]) -> tuple[int, ...]:
    """Return the number of tasks on each node, as srun would start them. Empty: the job did not ask for a number.

    SLURM_NTASKS is the number of all tasks, and SLURM_TASKS_PER_NODE only a limit: `sbatch -n 1 --ntasks-per-node=2`
    sets them to 1 and 2. Slurm sets SLURM_TASKS_PER_NODE even where no number was asked for.
    """
    total = _number(environ, "SLURM_NTASKS", why, "tasks")
    if total is None:
        per_node = _number(environ, "SLURM_NTASKS_PER_NODE", why, "tasks")
        if not per_node:
            return ()
        return (per_node,) * nodes
    limits = _per_node("SLURM_TASKS_PER_NODE", environ)
    # Limits of another step of the job, or of fewer nodes, do not count.
    if len(limits) != nodes or sum(limits) < total:
        limits = [total] * nodes
    if total == 0:
        return ()
    return tuple(spread(total, limits))


def _per_node(name: str, environ: Mapping[str, str]) -> list[int]:
    """Read a variable with a number for each node: `4(x2),3` → 4, 4, 3. Raises `LaunchError`."""
    text = environ.get(name, "")
    counts = counts_of_nodes(text)
    if counts is None:
        raise LaunchError(f"{name}={text[:80]} in the environment is not a list of numbers such as 4(x2),3.")
    return counts


def cpus_of_a_node(environ: Mapping[str, str]) -> str | None:
    """Return the number of the job's CPUs on each node. None: nodes have different numbers of CPUs."""
    cpus_per_node = set(_per_node("SLURM_JOB_CPUS_PER_NODE", environ))
    # Without --cpus-per-task srun gives the only task of a node all of the job's CPUs on it.
    if len(cpus_per_node) > 1:
        return None
    return environ.get("SLURM_CPUS_ON_NODE")


def _number(environ: Mapping[str, str], name: str, why: dict[str, str], key: str) -> int | None:
    """Read a whole number from the variable `name`, and note in `why[key]` that it is from there."""
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,10}", text):
        raise LaunchError(f"{name}={text[:80]} in the environment is not a whole number.")
    why[key] = f"{name}={text}"
    return int(text)


def line(used: Sequence[str], is_subset: bool, environ: Mapping[str, str], site_options: Sequence[str]) -> list[str]:
    """Make the part of srun's command line that stands before the command. It starts one agent on each host.

    Args:
        used: names of the hosts.
        is_subset: the job has other hosts too.
        environ: launch's own environment.
        site_options: the known machine's options for srun; empty where it has none.
    """
    count = str(len(used))
    # Agents get all of launch's environment, even in a job that was submitted with --export=NONE.
    command = ["srun", "-N", count, "-n", count, "--export=ALL"]
    if is_subset:
        command.append(f"--nodelist={','.join(used)}")
    if site_options:
        command += site_options
    else:
        # The agent is the only task of a node, and its ranks need all of the job's CPUs there.
        command.append("--ntasks-per-node=1")
        cpus = cpus_of_a_node(environ)
        if cpus:
            command.append(f"--cpus-per-task={cpus}")
    # launch binds ranks itself: srun would bind the agent, and all ranks of the host with it.
    return [*command, "--cpu-bind=none"]
