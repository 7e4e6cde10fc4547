"""``mmm startup RUN…|LOG…``: how long runs took to start, from their records or from the logs of a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmm.errors import RecordError, UserError
from mmm.outside import printable_lines, read_json
from mmm.runtime import startup
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.startup_logs import LoggedStart, read_log

EPILOG = """\
RUN is a run's folder; its start lasts from `launch` (or MMM_STARTED_AT) to the end of the first step on the last rank.
LOG is one of Megatron-DeepSpeed's job scripts at ALCF, …GPT1T_4L_z1_…/logs/…-nhosts4-ngpu16-….log: model and ranks are
in its path. It has a line `Job started at: 2023-11-02-183323 on HOST`, which the job script writes with
  echo "Job started at: $(date +%Y-%m-%d-%H%M%S) on $(hostname)"
and a later one with a date and a step, `[2023-11-02 18:34:13,122] … step=0`.
"""


def main(argv: list[str]) -> int:
    """Print the table and the parts of a single run. Returns 0. Raises UserError without any start."""
    parser = Parser(prog="mmm startup", description=__doc__, epilog=EPILOG)
    parser.add_argument("paths", nargs="+", metavar="RUN|LOG", type=Path)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw seconds against ranks to FILE")
    args = parser.parse_args(argv)

    starts: list[LoggedStart] = []
    tables: list[str] = []
    without: list[UserError] = []
    for path in args.paths:
        try:
            start, parts = _read(path)
        except UserError as error:  # of one of many: the others are still shown
            without.append(error)
            continue
        starts.append(start)
        if parts:
            tables.append(parts)
    if not starts:
        raise without[0]
    for reason in without:
        print(f"left out: {printable_lines(reason)}", file=sys.stderr)
    starts.sort(key=lambda start: (start.model, start.ranks, start.start))
    print(printable_lines(table(starts)))
    if len(starts) == len(tables) == 1:
        print(printable_lines(f"\n{tables[0]}"))
    if args.png:
        from mmm_lab.runs.curves import save_curves

        curves: dict[str, list[tuple[float, float]]] = {}
        for start in starts:
            curves.setdefault(start.model, []).append((start.ranks, start.seconds))
        print(f"picture: {save_curves({'start-up [s]': curves}, args.png)}")
    return 0


def _read(path: Path) -> tuple[LoggedStart, str]:
    """The start of a run's folder, with the table of its parts, or of a log, without. UserError where there is none."""
    if not path.is_dir():
        return read_log(path), ""
    config = _config(path)
    try:
        start = _of_record(path, config)
        hosts = [about["host"] for about in config["ranks"]]
        return start, f"{path}\n{startup.table(config['startup'], hosts)}"
    except (KeyError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path}: its start-up times cannot be read.") from None


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


def _of_record(folder: Path, config: dict[str, Any]) -> LoggedStart:
    span = startup.span(config["startup"])
    if span is None:
        raise RecordError(
            f"{folder}: this run had no first step ({config.get('module')} does not train), so its start "
            "has no end; its parts are in config.json, under `startup`."
        )
    return LoggedStart(str(config["module"]), len(config["ranks"]), *span, str(folder))
