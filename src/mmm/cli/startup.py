"""``mmm startup RUN…|LOG…``: how long runs took to start, from their records or from other programs' logs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmm.cli import show
from mmm.cli.startup_logs import LoggedStart, read_log
from mmm.errors import ConfigError, RecordError, UserError
from mmm.outside import printable_lines, read_json
from mmm.runtime import startup

EPILOG = """\
RUN is a run's folder; its start lasts from `launch` (or MMM_STARTED_AT) to the end of the first step on the last rank.
LOG is any program's log with a line `Job started at: 2023-11-02-183323 on HOST`, which a job script writes with
  echo "Job started at: $(date +%Y-%m-%d-%H%M%S) on $(hostname)"
and a later line with a time and `iter` or `step` and its number. A log may hold several jobs, one after another.
Of logs named …GPT1T_4L_z1_…/logs/…-nhosts4-ngpu16-….log model and ranks are in the path. LOG may also be a report of
such logs: a Markdown table of log, model, ranks, start and stop.
"""


def main(argv: list[str]) -> int:
    """Print the table, the parts of a single run, and the plot. Returns 0. Raises UserError without any start."""
    parser = argparse.ArgumentParser(
        prog="mmm startup", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", metavar="RUN|LOG", type=Path)
    parser.add_argument("--model", help="the model's name, instead of what each record or log says")
    parser.add_argument("--ranks", type=int, help="how many ranks, instead of what each log says")
    parser.add_argument(
        "--parts", action="store_true", help="the parts of every run's start; of a single run they are always shown"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw seconds against ranks to FILE")
    args = parser.parse_args(argv)
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks}: it must be at least 1")

    starts: list[LoggedStart] = []
    tables: list[str] = []
    without: list[UserError] = []
    for path in args.paths:
        try:
            found, parts = _read(path, args.model, args.ranks)
        except UserError as error:  # of one of many: the others are still shown
            without.append(error)
            continue
        starts += found
        tables += parts
    if not starts:
        raise without[0]
    for reason in without:
        print(f"left out: {printable_lines(reason)}", file=sys.stderr)
    starts.sort(key=lambda start: (start.model, start.ranks, start.start))
    print(printable_lines(table(starts)))
    if args.parts or len(starts) == len(tables) == 1:
        print(printable_lines("\n" + "\n\n".join(tables)))
    curves = {
        name: [(each.ranks, each.seconds) for each in starts if each.model == name]
        for name in dict.fromkeys(each.model for each in starts)
    }
    if len(starts) > 1:
        from mmm.history.curves import fitting_width, terminal_curves

        show("\n" + terminal_curves(curves, "start-up: seconds against ranks", fitting_width()))
    if args.png:
        from mmm.history.curves import save_curves

        print(f"picture: {save_curves({'start-up [s]': curves}, args.png)}")
    return 0


def _read(path: Path, model: str | None, ranks: int | None) -> tuple[list[LoggedStart], list[str]]:
    """The starts of a run's folder, or of a log; of a folder also the table of its parts. UserError where none is."""
    if path.is_dir():
        config = _config(path)
        try:
            start = _of_record(path, config, model)
            hosts = [about["host"] for about in config["ranks"]]
            return [start], [f"{path}\n{startup.table(config['startup'], hosts)}"]
        except (KeyError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, ValueError) as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"{path}: its start-up times cannot be read.") from None
    log = read_log(path, model, ranks)
    if log.without:
        print(
            f"{path}: {log.without} of {log.without + len(log.starts)} jobs had no first step: left out",
            file=sys.stderr,
        )
    return log.starts, []


def table(starts: Sequence[LoggedStart]) -> str:
    """model, ranks, start, stop, seconds, log: a line each."""
    width = max(5, *(len(each.model) for each in starts))
    lines = [f"{'model':<{width}}{'ranks':>7}  {'start':<19}  {'stop':<19}{'seconds':>10}  log"]
    for each in starts:
        full_seconds = not each.start.microsecond and not each.stop.microsecond
        lines.append(
            f"{each.model:<{width}}{each.ranks:>7}  {each.start:%Y-%m-%d %H:%M:%S}  "
            f"{each.stop:%Y-%m-%d %H:%M:%S}{each.seconds:>10.{0 if full_seconds else 2}f}  {each.log}"
        )
    return "\n".join(lines)


def _config(folder: Path) -> dict[str, Any]:
    """A run's config.json, with its start-up. RecordError where there is none."""
    path = folder / "config.json"
    if not path.exists():
        raise RecordError(
            f"{folder} holds no run's record: there is no {path.name}. Give a run's own folder, "
            "e.g. outputs/<module>/<timestamp>."
        )
    config = read_json(path, RecordError)
    if "startup" not in config:
        raise RecordError(
            f"{path} has no start-up times: the run ended before its first step had, or was made by a "
            "version of mmm that did not note them."
        )
    return config


def _of_record(folder: Path, config: dict[str, Any], model: str | None) -> LoggedStart:
    span = startup.span(config["startup"])
    if span is None:
        raise RecordError(
            f"{folder}: this run had no first step ({config.get('module')} does not train), so its start "
            "has no end; its parts are in config.json, under `startup`."
        )
    return LoggedStart(model or str(config["module"]), len(config["ranks"]), *span, str(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
