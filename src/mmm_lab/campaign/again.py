"""The command line that starts a recorded run again: launch's part of its line, its program, and ``--config RUN``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from mmm.errors import ConfigError, RecordError
from mmm.history.record.folder import CONFIG
from mmm.outside import read_json
from mmm_lab.campaign.command import LAUNCH, value_of
from mmm_launch.program import target
from mmm_launch.spec import options


def again(run: Path, changes: Sequence[str], ranks: int | None = None) -> list[str]:
    """Make the command line for a run with some flags changed.

    Args:
        run: the folder of the run.
        changes: flags of the program, which count before those of the record.
        ranks: number of ranks. None: as many as on record.

    Raises:
        UserError: the record is not there, or damaged; or something that it does not say has to be given.
    """
    file = run / CONFIG
    record = read_json(file, RecordError)
    try:
        line = record["launch"] or shlex.join([LAUNCH, *record["command"]])
        arguments = shlex.split(line)[1:]
        parsed = options.parse(arguments)
        command = parsed.command
        flags = target.parse(command).args
        recorded = len(record["ranks"])
        resume = record["options"].get("resume")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordError(f"{file} is not the record of a run, or damaged: {error!r}") from None
    # A program whose flags `mmm.run.command_line.parse` makes has this key in its record; … is a value of --env.
    if "config_file" not in record or "…" in line:
        raise RecordError(
            f"{file}: either no program that takes --config, or one with values of --env, which no record keeps; "
            f"start it yourself: {line}"
        )
    if resume not in (None, "auto") and value_of(changes, "resume") is None:
        raise ConfigError(f"{run} was resumed: add --resume {resume}, or --resume None to begin at step 0")
    # launch's options stand before the program. Its -n is given once.
    own = arguments[: -len(command)]
    if ranks or parsed.nproc is None:
        only_ranks = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        only_ranks.add_argument("-n", "--nproc")
        _, own = only_ranks.parse_known_args(own)
        own = [*[word for word in own if word != "--"], "-n", str(ranks or recorded)]
    start = command[: len(command) - len(flags)]
    return [LAUNCH, *own, *start, "--config", str(run), *changes]
