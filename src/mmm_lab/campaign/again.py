"""The command line that starts a recorded run again, with other values of some flags."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError, RecordError
from mmm.history.record.folder import CONFIG, versions
from mmm.outside import read_json
from mmm.run.config_file import OWN
from mmm_lab.campaign.command import LAUNCH, value_of
from mmm_launch.program import target
from mmm_launch.spec import options, scheduler

# How a record ends a variable whose value is a secret.
HIDDEN = "=…"


@dataclass
class Again:
    """How a run is started again.

    Attributes:
        argv: the command line, with ``launch`` or ``python3`` first.
        notes: what differs from the run on record, a sentence each.
    """

    argv: list[str]
    notes: list[str] = field(default_factory=list)


def again(
    run: Path,
    changes: Sequence[str],
    ranks: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Again:
    """Make the command line for a run with some flags changed.

    A program that takes ``--config`` reads all flags from the record. Another one is given its own command line again.

    Args:
        run: the folder of the run, or its config.json.
        changes: flags of the program, which count before those of the record.
        ranks: number of ranks. None: as many as on record.
        environ: the variables by which a job of a scheduler is known.

    Raises:
        UserError: the record is not there, damaged, or lacks what is needed; or the changes would write into the run's
            folder, or the hosts that it needs are not there.
    """
    if run.name == CONFIG:
        run = run.parent
    file = run / CONFIG
    config = read_json(file, RecordError)
    notes: list[str] = []
    recorded_ranks = len(_list(config, "ranks", file))
    n_hosts = len(_list(config, "hosts", file))
    launch_options, command = _launch_line(config, file)
    outdir = value_of(changes, "outdir")
    if outdir is not None:
        folder = Path(outdir).expanduser()
        # The new run would overwrite the record that it is made from.
        if folder.resolve() == run.resolve():
            raise ConfigError(
                f"--outdir {outdir}: the run on record is there. Give another folder; to continue that run, start its "
                "own command with --resume auto"
            )

    # Where the arguments of the program begin.
    program = target.parse(command)
    first = len(command) - len(program.args)
    # A program whose flags `mmm.run.command_line.parse` makes has this key in its record.
    if program.is_python and "config_file" in config:
        arguments = ["--config", str(run)]
    else:
        if not program.is_python:
            first = 1
        arguments = without_flags(command[first:], OWN)
        notes.append(
            "the record does not say that this program takes --config, so it gets its own command line again: a "
            "default that has changed since is the new one"
        )
    if value_of(changes, "resume") is None:
        arguments += _resume(config, run, notes)
    # Of a flag that is there twice, the last one counts.
    argv = [*command[:first], *arguments, *changes]

    # A program that was started without launch, on one rank, is started without it again.
    by_launch = config.get("launch") is not None
    is_parallel = recorded_ranks > 1
    if by_launch or is_parallel or ranks is not None:
        if is_parallel and not by_launch:
            starter = config.get("started_by")
            notes.append(f"it was started by {starter}; this time it is by launch")
        launch_options = _with_ranks(launch_options, ranks, recorded_ranks)
        argv = [LAUNCH, *launch_options, *argv]
        _check_hosts(argv, n_hosts, run, environ)
    notes += _differences(config)
    return Again(argv, notes)


def without_flags(
    arguments: Sequence[str],
    names: Sequence[str],
) -> list[str]:
    """Return the arguments without these flags and their values."""
    others: list[str] = []
    # A flag's values are the words up to the next flag.
    is_dropped = False
    for argument in arguments:
        if argument.startswith("--"):
            flag, _, _ = argument.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            is_dropped = name in names
        if not is_dropped:
            others.append(argument)
    return others


def _list(
    config: Mapping[str, Any],
    key: str,
    file: Path,
) -> list[Any]:
    """Return a list of the record. Raises RecordError: it is not a list, or empty."""
    value = config.get(key)
    if not isinstance(value, list) or not value:
        raise RecordError(f"{file} has no list {key!r}: it is not the record of a run, or damaged")
    return value


def _launch_line(
    config: Mapping[str, Any],
    file: Path,
) -> tuple[list[str], list[str]]:
    """Return launch's own options, and the program with its arguments.

    Raises:
        RecordError: the record has none, or a variable's value is hidden in it.
        LaunchError: an option that launch does not have.
    """
    line = config.get("launch")
    if line is None:
        command = _list(config, "command", file)
        if not all(isinstance(word, str) for word in command):
            raise RecordError(f"{file}: the words of 'command' are not all texts: it is damaged")
        return [], command
    try:
        starter, *arguments = shlex.split(line)
        if starter != LAUNCH:
            raise ValueError(f"it begins with {starter}")
    except (AttributeError, ValueError) as error:
        raise RecordError(f"{file}: 'launch' is not the line of a launch: {error}") from None
    command = options.parse(arguments).command
    if not command:
        raise RecordError(f"{file}: 'launch' has no program: {line}")
    # launch's options stand before the program.
    n_options = len(arguments) - len(command)
    own = arguments[:n_options]
    for argument in own:
        if argument.endswith(HIDDEN):
            variable = argument.removeprefix("--env=")
            raise RecordError(
                f"{file}: launch was given --env {variable}, whose value no record keeps. Start it yourself, with the "
                f"value: {line}"
            )
    return own, command


def _with_ranks(
    own: Sequence[str],
    ranks: int | None,
    recorded: int,
) -> list[str]:
    """Return launch's options with a number of ranks. The user may have let launch choose that of the record.

    Args:
        own: launch's options on record.
        ranks: the number that the user asks for now. None: as on record.
        recorded: number of ranks on record.
    """
    parsed = options.parse(own)
    has_ranks = parsed.nproc is not None or parsed.elastic is not None
    argv = list(own)
    if ranks is None:
        if has_ranks:
            return argv
        ranks = recorded
    # The last -n counts. "--" ends launch's options.
    end = len(argv)
    if argv[-1:] == ["--"]:
        end -= 1
    argv[end:end] = ["-n", str(ranks)]
    return argv


def _check_hosts(
    argv: Sequence[str],
    n_hosts: int,
    run: Path,
    environ: Mapping[str, str],
) -> None:
    """Raises ConfigError: the run was on several hosts, and launch would start all of its ranks on this one."""
    parsed = options.parse(argv[1:])
    # With one of these options launch knows the hosts.
    if n_hosts == 1 or parsed.hosts or parsed.hostfile:
        return
    job = scheduler.detect(environ, parsed.scheduler)
    if job.scheduler == "none":
        raise ConfigError(
            f"{run} was on {n_hosts} hosts, and this is not inside a job. Start it inside a job of as many hosts, or "
            f"submit it: mmm submit -N {n_hosts} -t TIME -- {shlex.join(argv)}"
        )


def _resume(
    config: Mapping[str, Any],
    run: Path,
    notes: list[str],
) -> list[str]:
    """The flag by which a run begins at the checkpoint of another run. A run's own checkpoints are not used."""
    flags = config.get("options")
    resume = None
    if isinstance(flags, dict):
        resume = flags.get("resume")
    if resume is None:
        return []
    # "auto" is the newest checkpoint in the run's folder.
    is_own = resume == "auto"
    if not is_own:
        checkpoint = Path(resume).expanduser().resolve()
        is_own = checkpoint.is_relative_to(run.resolve())
    if is_own:
        notes.append("the run on record was resumed from its own checkpoint; this one begins at step 0")
        return []
    notes.append(f"as the run on record, it begins at the checkpoint {resume}")
    return ["--resume", str(resume)]


def _differences(config: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each way in which this installation differs from that of the record."""
    notes: list[str] = []
    folder = config.get("folder")
    # A record of an older version has no folder.
    if isinstance(folder, str) and folder != os.getcwd():
        notes.append(f"the run on record was started in {folder}; relative paths are now read from here")
    installed = versions()
    recorded = config.get("versions")
    if not isinstance(recorded, dict):
        recorded = {}
    for name in ("mmm", "torch"):
        version = recorded.get(name)
        if version != installed[name]:
            notes.append(f"the record is of {name} {version}; {installed[name]} is installed")
    return notes
