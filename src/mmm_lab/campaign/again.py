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
    """The command line for a run with some flags changed.

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
    made = Again([])
    recorded_ranks = len(_list(config, "ranks", file))
    hosts = len(_list(config, "hosts", file))
    own, command = _launch_line(config, file)
    outdir = value_of(changes, "outdir")
    if outdir is not None and Path(outdir).expanduser().resolve() == run.resolve():
        raise ConfigError(
            f"--outdir {outdir}: the run on record is there. Give another folder; to continue that run, start its own "
            "command with --resume auto"
        )

    # Where the arguments of the program begin.
    program = target.parse(command)
    first = len(command) - len(program.args)
    if program.is_python and "config_file" in config:
        arguments = ["--config", str(run)]
    else:
        if not program.is_python:
            first = 1
        arguments = without_flags(command[first:], OWN)
        made.notes.append(
            "the record does not say that this program takes --config, so it gets its own command line again: a "
            "default that has changed since is the new one"
        )
    if value_of(changes, "resume") is None:
        arguments += _resume(config, run, made.notes)
    made.argv = [*command[:first], *arguments, *changes]

    # A program that ran alone is started without launch again.
    by_launch = config.get("launch") is not None
    if by_launch or ranks is not None or recorded_ranks > 1:
        if not by_launch and recorded_ranks > 1:
            made.notes.append(f"it was started by {config.get('started_by')}; this time it is by launch")
        made.argv = [LAUNCH, *_with_ranks(own, ranks, recorded_ranks), *made.argv]
        _check_hosts(made.argv, hosts, run, environ)
    made.notes += _differences(config)
    return made


def without_flags(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Arguments without these flags and their values."""
    others: list[str] = []
    # A flag's values are the words up to the next flag.
    is_dropped = False
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0].replace("-", "_")
            is_dropped = name in names
        if not is_dropped:
            others.append(argument)
    return others


def _list(config: Mapping[str, Any], key: str, file: Path) -> list[Any]:
    """A list of the record. Raises RecordError: it is none, or empty."""
    value = config.get(key)
    if not isinstance(value, list) or not value:
        raise RecordError(f"{file} has no list {key!r}: it is not the record of a run, or damaged")
    return value


def _launch_line(config: Mapping[str, Any], file: Path) -> tuple[list[str], list[str]]:
    """launch's own options, and the program with its arguments.

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
        words = shlex.split(line)
        if words[0] != LAUNCH:
            raise ValueError(f"it begins with {words[0]}")
    except (AttributeError, IndexError, ValueError) as error:
        raise RecordError(f"{file}: 'launch' is not the line of a launch: {error}") from None
    command = options.parse(words[1:]).command
    if not command:
        raise RecordError(f"{file}: 'launch' has no program: {line}")
    own = words[1 : len(words) - len(command)]
    hidden = [word for word in own if word.endswith("=…")]
    if hidden:
        name = hidden[0].removeprefix("--env=").removesuffix("=…")
        raise RecordError(
            f"{file}: launch was given --env {name}=…, whose value no record keeps. Start it yourself, with the value: "
            f"{line}"
        )
    return own, command


def _with_ranks(own: Sequence[str], ranks: int | None, recorded: int) -> list[str]:
    """launch's options with the number of ranks: that of the record, which launch may have found out by itself."""
    own_options = options.parse(own)
    if ranks is None and (own_options.nproc is not None or own_options.elastic is not None):
        return list(own)
    # The last -n counts.
    dashes = ["--"] if own[-1:] == ["--"] else []
    return [*own[: len(own) - len(dashes)], "-n", str(ranks or recorded), *dashes]


def _check_hosts(argv: Sequence[str], hosts: int, run: Path, environ: Mapping[str, str]) -> None:
    """Raises ConfigError: the run was on several hosts, and launch would start all of its ranks on this one."""
    own_options = options.parse(argv[1:])
    if hosts == 1 or own_options.hosts or own_options.hostfile:
        return
    if scheduler.detect(environ, own_options.scheduler).scheduler == "none":
        raise ConfigError(
            f"{run} was on {hosts} hosts, and this is not inside a job. Start it inside a job of as many hosts, or "
            f"submit it: mmm submit -N {hosts} -t TIME -- {shlex.join(argv)}"
        )


def _resume(config: Mapping[str, Any], run: Path, notes: list[str]) -> list[str]:
    """The flag by which a run begins at the checkpoint of another run. A run's own checkpoints are not used."""
    flags = config.get("options")
    resume = flags.get("resume") if isinstance(flags, dict) else None
    if resume is None:
        return []
    if resume != "auto" and not Path(resume).expanduser().resolve().is_relative_to(run.resolve()):
        notes.append(f"as the run on record, it begins at the checkpoint {resume}")
        return ["--resume", str(resume)]
    notes.append("the run on record was resumed from its own checkpoint; this one begins at step 0")
    return []


def _differences(config: Mapping[str, Any]) -> list[str]:
    """What differs between the installation here and that of the record."""
    notes: list[str] = []
    folder = config.get("folder")
    if isinstance(folder, str) and folder != os.getcwd():
        notes.append(f"the run on record was started in {folder}; relative paths are now read from here")
    recorded = config.get("versions")
    installed = versions()
    for name in ("mmm", "torch"):
        version = recorded.get(name) if isinstance(recorded, dict) else None
        if version != installed[name]:
            notes.append(f"the record is of {name} {version}; {installed[name]} is installed")
    return notes
