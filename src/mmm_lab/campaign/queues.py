"""Calls the commands of Slurm, PBS and Flux: submit a script, and make it follow another job."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

from mmm.errors import LaunchError
from mmm.outside import printable
from mmm_launch.machines.machine import Machine

PATIENCE = 120.0  # s that a scheduler may take to answer
# How scripts are read and written: paths in them may have any bytes.
TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}


class Queue(NamedTuple):
    """The commands of a scheduler, and the lines of its scripts. ``{}`` are filled in.

    Attributes:
        submit: command that submits the script on its standard input.
        name: arguments that name the job.
        after: arguments that make the job wait for another.
        cancel: command that ends jobs, and takes waiting ones out of the queue; shown to the user.
        directive: what begins a line for the scheduler in a script.
        lines: lines of a job on a machine that is not known.
        queue_line: line that chooses a queue.
        project_line: line that names the project.
    """

    submit: tuple[str, ...]
    name: tuple[str, ...]
    after: tuple[str, ...]
    cancel: str
    directive: str
    lines: tuple[str, ...]
    queue_line: str
    project_line: str


QUEUES = {
    "slurm": Queue(
        submit=("sbatch", "--parsable"),
        name=("--job-name={}",),
        after=("--dependency=afterany:{}",),
        cancel="scancel",
        directive="#SBATCH",
        lines=("#SBATCH -N {hosts} -t {time}",),
        queue_line="#SBATCH -p {queue}",
        project_line="#SBATCH -A {project}",
    ),
    "pbs": Queue(
        submit=("qsub",),
        name=("-N", "{}"),
        after=("-W", "depend=afterany:{}"),
        cancel="qdel",
        directive="#PBS",
        lines=("#PBS -l select={hosts}", "#PBS -l walltime={time}"),
        queue_line="#PBS -q {queue}",
        project_line="#PBS -A {project}",
    ),
    # Source: the manual of flux-core, flux-batch(1).
    "flux": Queue(
        submit=("flux", "batch"),
        name=("--job-name={}",),
        after=("--dependency=afterany:{}",),
        cancel="flux cancel",
        directive="# flux:",
        lines=("# flux: -N {hosts} --exclusive -t {time}",),
        queue_line="# flux: -q {queue}",
        project_line="# flux: --setattr=bank={project}",
    ),
}


def scheduler_here() -> str:
    """The scheduler whose command is on PATH. Raises LaunchError if there is none."""
    for name, queue in QUEUES.items():
        if shutil.which(queue.submit[0]):
            return name
    raise LaunchError(
        "no scheduler here: none of sbatch, qsub and flux is on PATH. Run it on a login host of the cluster, or show "
        "the script with --site NAME --dry-run"
    )


def unknown_machine(scheduler: str, queue: str | None, project: str | None) -> Machine:
    """A machine of which only the scheduler is known."""
    commands = QUEUES[scheduler]
    lines = list(commands.lines)
    if queue:
        lines.append(commands.queue_line)
    if project:
        lines.append(commands.project_line)
    return Machine("", scheduler=scheduler, script=lines)


def submit_words(scheduler: str, name: str, after: str | None = None) -> list[str]:
    """The command that submits the script on its standard input.

    Args:
        after: id of a job that has to be over first.
    """
    commands = QUEUES[scheduler]
    argv = [*commands.submit, *(argument.format(name) for argument in commands.name)]
    if after is not None:
        argv += [argument.format(after) for argument in commands.after]
    return argv


def submit(
    scheduler: str,
    script: str,
    name: str,
    after: str | None = None,
) -> str:
    """Submit a script. Returns the job's id. Raises LaunchError if the scheduler refuses it."""
    answer = _run(submit_words(scheduler, name, after), script, _environment(os.environ)).strip()
    # The last line has the id; sbatch may write "12;cluster".
    return answer.rpartition("\n")[2].partition(";")[0]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of a job that this is called in.

    sbatch would hand them all to the new job, whose tasks and memory may differ.
    """
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def _run(argv: list[str], stdin: str, environ: Mapping[str, str]) -> str:
    """Run a command and return its output. Raises LaunchError if it fails."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            env=environ,
            capture_output=True,
            timeout=PATIENCE,
            **TEXT,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{argv[0]} is not on PATH here: submit where it is, or show the script with --dry-run"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]}: {error}") from None
    # Schedulers explain refusals in several lines on stderr, or on stdout.
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise LaunchError(f"{argv[0]}: {printable(message) or f'exit code {done.returncode}'}")
    return done.stdout
