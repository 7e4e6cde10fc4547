"""A program's command line as a job runs it: by launch, with a signal before the job's end, in a folder."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from mmm.errors import ConfigError
from mmm.outside import expanded
from mmm_launch.spec.options import parse

LAUNCH = "launch"
CONTAINERS = ("apptainer", "singularity")
SAVING = 300.0  # s before the end of a job at which it saves


def time_to_save(walltime: float) -> float:
    """Seconds before a job's end at which it saves by default: 5 minutes, but at most a tenth of the job."""
    return min(SAVING, walltime / 10)


def value_of(command: Sequence[str], flag: str) -> str | None:
    """The value of a flag, ``--flag value`` or ``--flag=value``. None without the flag; the last one counts."""
    names = (f"--{flag}", f"--{flag.replace('_', '-')}")
    flag_value = None
    for index, argument in enumerate(command):
        name, equals, value = argument.partition("=")
        if name in names:
            if not equals:
                value = "".join(command[index + 1 : index + 2])
            flag_value = value
    return flag_value


def name_of(command: Sequence[str]) -> str:
    """The name of a program: the last part of its module, or its file without ``.py``; ``job`` if there is neither."""
    for before, argument in zip(["", *command], command, strict=False):
        if before == "-m" or argument.endswith(".py"):
            name = argument.rpartition(".")[2]
            if argument.endswith(".py"):
                name = Path(argument).stem
            return re.sub(r"\W", "_", name, flags=re.ASCII) or "job"
    return "job"


def folder_of(command: Sequence[str]) -> Path:
    """The folder of the run: that of ``--outdir``, or a new one, as the run itself would make it.

    Raises:
        ConfigError: ``--outdir`` has no value, or a variable in it is not set.
    """
    outdir = value_of(command, "outdir")
    if outdir == "":
        raise ConfigError("--outdir is given no folder")
    if outdir is None:
        # The job cannot choose it: all jobs of a run need the same folder.
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        return (Path("outputs") / name_of(command) / stamp).absolute()
    return expanded(outdir).absolute()


def going_on(command: Sequence[str], folder: Path) -> list[str]:
    """The command that begins a run in `folder`, or resumes it from the last checkpoint of the job before.

    Raises:
        ConfigError: the command saves nothing, or resumes from another run.
    """
    if value_of(command, "checkpoint_every") is None:
        raise ConfigError(
            "--jobs: the command has no --checkpoint_every, and a job resumes from what the one before it saved; add "
            "it, such as --checkpoint_every 500"
        )
    # ``--resume auto`` takes the newest checkpoint of the same folder, or begins anew.
    resume = value_of(command, "resume")
    if resume not in (None, "auto"):
        raise ConfigError(
            f"--jobs: the command has --resume {resume}, from which every job would begin; leave it out: the jobs are "
            "given --resume auto"
        )
    if value_of(command, "overwrite") is not None:
        raise ConfigError("--jobs: the command has --overwrite, and its jobs continue one record: leave it out")
    argv = list(command)
    if not value_of(command, "outdir"):
        argv += ["--outdir", str(folder)]
    if not resume:
        argv += ["--resume", "auto"]
    return argv


def starts_container(command: Sequence[str]) -> bool:
    """Whether launch runs inside a container: ``apptainer exec IMAGE launch …``."""
    return command[0] in CONTAINERS and LAUNCH in command


def launch_line(
    command: Sequence[str],
    walltime: float,
    before_end: float,
    stage: str | None = None,
) -> str:
    """The line of the job's script.

    Ranks that save (``--checkpoint_every``) get SIGUSR1 before the job's end, which launch passes on. Otherwise launch
    passes SIGTERM, which ends any program in order. The script computes itself when that is: bash's SECONDS are those
    since the job began.

    Args:
        command: may begin with ``launch`` and options of it, or with the container that launch runs in.
        walltime: seconds of the job.
        before_end: seconds before its end at which the signal comes.
        stage: what launch copies to each host first.

    Raises:
        LaunchError: an option that launch does not have.
    """
    argv = list(command)
    container: list[str] = []
    if starts_container(argv):
        container = argv[: argv.index(LAUNCH)]
        argv = argv[len(container) :]
    # Options of launch itself.
    options: list[str] = []
    if argv[0] == LAUNCH:
        argv = argv[1:]
        options = argv[: len(argv) - len(parse(argv).command)]
    saves = value_of(argv, "checkpoint_every") is not None
    # With --preserve-status the exit code stays that of launch.
    line = ["timeout", "--foreground", "--preserve-status", "--signal", "USR1" if saves else "TERM"]
    line += [f"$(({walltime - before_end:.0f} - SECONDS))", *map(shlex.quote, container), LAUNCH]
    # A program that saves nothing gets all of the time that is left to end in.
    if not saves and value_of(options, "grace") is None:
        line += ["--grace", f"{before_end:.0f}"]
    if stage:
        line += ["--stage", shlex.quote(stage)]
    return " ".join([*line, shlex.join(argv)])
