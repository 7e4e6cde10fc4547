"""Slurm: what a job finds in its environment, and the `srun` line."""

import re
from collections.abc import Mapping, Sequence

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts
from mmm_launch.spec.hosts import Job, is_even, spread
from mmm_launch.spec.mpi import Request, joined


def detect(environ: Mapping[str, str]) -> Job | None:
    """The Slurm allocation this process is in (the shell of `salloc`, the script of `sbatch`), or None.

    Raises `LaunchError`: a variable of Slurm's that cannot be read.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    name = next((n for n in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(n)), None)
    if not job or name is None:
        return None
    why = {"scheduler": f"SLURM_JOB_ID={job}", "hosts": f"{name}={environ[name]}"}
    names = tuple(hosts.expand(environ[name]))
    tasks = _tasks(environ, len(names), why)
    gpus = _number(environ, "SLURM_GPUS_ON_NODE", why, "gpus_per_host")
    asked = re.fullmatch(r"(?:.*:)?(\d+)", environ.get("SLURM_GPUS_PER_NODE", ""))
    if gpus is None and asked:
        gpus = int(asked[1])  # as typed: 4, a100:4
        why["gpus_per_host"] = f"SLURM_GPUS_PER_NODE={asked[0]}"
    return Job(
        "slurm",
        job,
        names,
        why,
        tasks=tasks,
        gpus_per_host=gpus,
        end_time=_number(environ, "SLURM_JOB_END_TIME", why, "end_time"),
    )


def _tasks(environ: Mapping[str, str], nodes: int, why: dict[str, str]) -> tuple[int, ...]:
    """Tasks of each node where a number of tasks was asked for; else none. As srun has them in this environment.

    SLURM_NTASKS counts; SLURM_NTASKS_PER_NODE beside it is a limit, and so is SLURM_TASKS_PER_NODE: `sbatch -n 1
    --ntasks-per-node=2` leaves 1, 2 and 2. Slurm sets SLURM_TASKS_PER_NODE also where no number was asked for.
    """
    said: dict[str, str] = {}
    total = _number(environ, "SLURM_NTASKS", said, "total")
    each = _number(environ, "SLURM_NTASKS_PER_NODE", said, "each")
    if total is None:
        if each is not None:
            why["tasks"] = said["each"]
        return (each or 0,) * nodes if each else ()
    per_node = _per_node("SLURM_TASKS_PER_NODE", environ)
    limits = [per_node] if len(per_node) == nodes else []
    limits += [[each or total] * nodes, [total] * nodes]
    if per_node:
        said["per_node"] = f"SLURM_TASKS_PER_NODE={environ['SLURM_TASKS_PER_NODE']}"
    why["tasks"] = ", ".join(said.values())
    return tuple(spread(total, next(some for some in limits if sum(some) >= total))) if total else ()


def _per_node(name: str, environ: Mapping[str, str]) -> list[int]:
    """The numbers in a variable such as `4(x2),3`: 4, 4, 3. Raises `LaunchError`."""
    found: list[int] = []
    text = environ.get(name, "")
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        number, times = (
            (hosts.bounded_number(match[1]), hosts.bounded_number(match[2] or "1")) if match else (None, None)
        )
        if number is None or times is None or len(found) + times > hosts.MOST:
            raise LaunchError(f"{name}={text[:80]} in the environment is no list of numbers such as 4(x2),3.")
        found += [number] * times
    return found


def cpus_of_a_node(environ: Mapping[str, str]) -> str | None:
    """The job's CPUs on each node; None where they differ: srun, not told a number, gives a task all of them."""
    each = set(_per_node("SLURM_JOB_CPUS_PER_NODE", environ))
    return environ.get("SLURM_CPUS_ON_NODE") if len(each) < 2 else None


def _number(environ: Mapping[str, str], name: str, why: dict[str, str], key: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    number = (
        (int(text) if re.fullmatch("[0-9]{1,18}", text) else None) if key == "end_time" else hosts.bounded_number(text)
    )
    if number is None:
        raise LaunchError(f"{name}={text[:80]} in the environment is not a whole number.")
    why[key] = f"{name}={text}"
    return number


def line(request: Request, words: Sequence[str]) -> list[str]:
    """`srun` and its words before the command. `words`: the site's own, or how tasks share a host.

    srun hands its own environment on (--export=ALL); launch puts `--env` there.
    """
    made = ["srun", "-N", str(len(request.hosts)), "-n", str(request.processes)]
    if not is_even(
        request.counts
    ):  # the only way by which srun puts different numbers on nodes, each where it is named
        named = [host for host, count in zip(request.hosts, request.counts, strict=True) for _ in range(count)]
        made += ["--distribution=arbitrary", f"--nodelist={joined(named)}"]
        words = [word for word in words if not word.startswith("--ntasks-per-node")]
    elif request.subset:
        made.append(f"--nodelist={','.join(request.hosts)}")
    if request.env:
        made.append("--export=ALL")
    return [*made, *words, *request.bind, *request.more]
