"""A program's command line as a job runs it: by launch, with a signal before the job's end, in a folder to go on in."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from mmm.errors import ConfigError
from mmm_launch.spec.options import parse

LAUNCH = "launch"
SAVING = 300.0  # s


def time_to_save(walltime: float) -> float:
    """Seconds before a job's end at which it saves, if nothing else is said: 5 minutes, at most a tenth of the job."""
    return min(SAVING, walltime / 10)


def value_of(command: Sequence[str], flag: str) -> str | None:
    """What a flag of a command line is given, ``--flag value`` or ``--flag=value``, the last time; None without it."""
    names = (f"--{flag}", f"--{flag.replace('_', '-')}")
    found = None
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else (command[place + 1] if place + 1 < len(command) else "")
    return found


def name_of(command: Sequence[str]) -> str:
    """What a program is called: the last part of its module, or its file without the ending; "job" if neither."""
    for before, word in zip(["", *command], command, strict=False):
        if before == "-m" or word.endswith(".py"):
            name = Path(word).stem if word.endswith(".py") else word.rpartition(".")[2]
            return re.sub(r"\W", "_", name, flags=re.ASCII) or "job"
    return "job"


def folder_of(command: Sequence[str]) -> Path:
    """The folder of the run: that of ``--outdir``, or a new one, as the run itself would make it."""
    given = value_of(command, "outdir")
    if given == "":
        raise ConfigError("--outdir is given no folder")
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    return (Path(given).expanduser() if given else Path("outputs") / name_of(command) / stamp).absolute()


def going_on(command: Sequence[str], folder: Path) -> list[str]:
    """The command that begins a run in `folder`, or goes on where the job before has saved.

    Raises:
        ConfigError: it saves nothing, or begins from elsewhere.
    """
    if value_of(command, "checkpoint_every") is None:
        raise ConfigError(
            "--until-done: the command has no --checkpoint_every, and a job goes on from what the one before has "
            "saved; add it, such as --checkpoint_every 500"
        )
    resume = value_of(command, "resume")
    if resume not in (None, "auto"):
        raise ConfigError(
            f"--until-done: the command has --resume {resume}, from which every job would begin; leave it out: the "
            "jobs are given --resume auto"
        )
    if value_of(command, "overwrite") is not None:
        raise ConfigError("--until-done: the command has --overwrite, and its jobs go on with one record: leave it out")
    more = [] if value_of(command, "outdir") else ["--outdir", str(folder)]
    return [*command, *more, *([] if resume else ["--resume", "auto"])]


def launch_line(command: Sequence[str], walltime: float, before_end: float, stage: str | None = None) -> str:
    """The line of the job's script.

    Ranks that save (``--checkpoint_every``) get SIGUSR1 before the job's end, which launch passes on. To others launch
    passes SIGTERM, which ends any program in order. When that is, the script counts itself: bash's SECONDS are those
    since the job began.

    Args:
        command: may begin with ``launch`` and options of it.
        walltime: seconds of the job. before_end: of those, when the signal comes.
        stage: what launch copies to each host first.

    Raises:
        LaunchError: an option that launch does not have.
    """
    words = list(command)
    own: list[str] = []
    if command[0] == LAUNCH:
        words = list(command[1:])
        own = words[: len(words) - len(parse(words).command)]
    saves = value_of(words, "checkpoint_every") is not None
    number = "USR1" if saves else "TERM"
    line = ["timeout", "--foreground", "--preserve-status", "--signal", number]
    line += [f"$(({walltime - before_end:.0f} - SECONDS))", LAUNCH]
    if not saves and value_of(own, "grace") is None:
        line += ["--grace", f"{before_end:.0f}"]
    if stage:
        line += ["--stage", shlex.quote(stage)]
    return " ".join([*line, shlex.join(words)])
