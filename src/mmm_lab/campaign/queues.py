"""Slurm's and PBS' own commands: submit a script, let it follow another job, cancel it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

from mmm.errors import LaunchError
from mmm.outside import printable
from mmm_launch.machines.machine import Machine

PATIENCE = 120.0  # s; a busy scheduler takes its time
TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}  # of a script: paths may have any bytes


class Queue(NamedTuple):
    """A scheduler's words. `directive` begins its lines in a script; `variable` has a job's id; `{}` are filled in.

    Attributes:
        lines: of a job on a machine that is not known. queue_line, project_line: where these are given.
        output: the line by which a job's output goes to a file of a folder, which bears the job's id.
    """

    submit: tuple[str, ...]
    name: tuple[str, ...]
    after: tuple[str, ...]
    cancel: str
    variable: str
    directive: str
    lines: tuple[str, ...]
    queue_line: str
    project_line: str
    output: str


QUEUES = {
    "slurm": Queue(
        submit=("sbatch", "--parsable"),
        name=("--job-name={}",),
        after=("--dependency=afterany:{}",),
        cancel="scancel",
        variable="SLURM_JOB_ID",
        directive="#SBATCH",
        lines=("#SBATCH -N {hosts} -t {time}",),
        queue_line="#SBATCH -p {queue}",
        project_line="#SBATCH -A {project}",
        output="#SBATCH -o {}/%j.out",
    ),
    "pbs": Queue(
        submit=("qsub",),
        name=("-N", "{}"),
        after=("-W", "depend=afterany:{}"),
        cancel="qdel",
        variable="PBS_JOBID",
        directive="#PBS",
        lines=("#PBS -l select={hosts}", "#PBS -l walltime={time}"),
        queue_line="#PBS -q {queue}",
        project_line="#PBS -A {project}",
        output="#PBS -j oe -o {}/",
    ),
}


def scheduler_here() -> str:
    """The scheduler whose command is on PATH. Raises LaunchError: none is."""
    for name, queue in QUEUES.items():
        if shutil.which(queue.submit[0]):
            return name
    raise LaunchError(
        "no scheduler here: neither sbatch nor qsub is on PATH. Run it on a login host of the cluster, or show the "
        "script with --site NAME --dry-run"
    )


def unknown_machine(scheduler: str, queue: str | None, project: str | None) -> Machine:
    """A machine of which nothing but the scheduler is known."""
    words = QUEUES[scheduler]
    lines = [*words.lines, *([words.queue_line] if queue else []), *([words.project_line] if project else [])]
    return Machine("", scheduler=scheduler, script=lines)


def submit_words(scheduler: str, name: str, after: str | None = None) -> list[str]:
    """The command that submits the script on its standard input. `after`: the job that has to be over before."""
    words = QUEUES[scheduler]
    return [
        *words.submit,
        *(word.format(name) for word in words.name),
        *(word.format(after) for word in words.after if after),
    ]


def submit(scheduler: str, script: str, name: str, after: str | None = None) -> str:
    """Submit a script. Returns the job's id. Raises LaunchError: the scheduler takes no job."""
    answer = _run(submit_words(scheduler, name, after), script, _environment(os.environ))
    return answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""  # sbatch: "12;cluster"


def cancel(scheduler: str, job: str) -> None:
    """Take a job out of the queue. Raises LaunchError."""
    _run([QUEUES[scheduler].cancel, job], "", os.environ)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what belongs to the job that submits: sbatch gives all of it to the next, whose own may differ."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def _run(words: list[str], stdin: str, environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(words, input=stdin, env=environ, capture_output=True, timeout=PATIENCE, **TEXT)
    except FileNotFoundError:
        raise LaunchError(
            f"{words[0]} is not on PATH here: submit where it is, or show the script with --dry-run"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{words[0]}: {error}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise LaunchError(f"{words[0]}: {printable(said) or f'exit code {done.returncode}'}")
    return done.stdout
