"""``mmm startup RUN…|LOG…``: how long runs took to start, from their records or from the logs of a study."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mmm.errors import RecordError, UserError
from mmm.outside import printable_lines, read_json
from mmm.runtime import startup
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.startup_logs import LoggedStart, read_log
from mmm_lab.columns import in_columns

EPILOG = """\
RUN is a run's folder; its start lasts from `launch` (or MMM_STARTED_AT) to the end of the first step on the last rank.
LOG is one of Megatron-DeepSpeed's job scripts at ALCF, …GPT1T_4L_z1_…/logs/…-nhosts4-ngpu16-….log: model and ranks are
in its path. It has a line `Job started at: 2023-11-02-183323 on HOST`, which the job script writes with
  echo "Job started at: $(date +%Y-%m-%d-%H%M%S) on $(hostname)"
and a later one with a date and a step, `[2023-11-02 18:34:13,122] … step=0`.

examples:
  mmm startup outputs/lm/2026-01-01-120000
  mmm startup runs/* --out startup.png
exit codes: 0 shown, 2 wrong arguments, or no start can be read
"""
NUMERIC = (1, 4)  # indices of the columns that are aligned to the right


def main(argv: list[str]) -> int:
    """Print the table, and the parts of a single run. Returns 0. Raises UserError: no start can be read."""
    parser = Parser(
        prog="mmm startup",
        description="Show how long runs took to start, from their records or from the logs of a study.",
        epilog=EPILOG,
    )
    parser.add_argument("paths", nargs="+", metavar="RUN|LOG", type=Path, help="a run's folder, or a log")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="draw seconds against ranks to FILE, such as startup.png"
    )
    args = parser.parse_args(argv)

    starts = []
    parts = ""
    errors = []
    for path in args.paths:
        try:
            start, parts = _read(path)
        except UserError as error:
            # One of several: the others are still shown.
            errors.append(error)
            continue
        starts.append(start)
    if not starts:
        raise errors[0]
    for reason in errors:
        print(f"left out: {printable_lines(reason)}", file=sys.stderr)
    # As a study reads them: each model's curve, from few ranks to many.
    starts.sort(key=lambda start: (start.model, start.ranks, start.start))
    print(printable_lines(table(starts)))
    if len(starts) == 1 and parts:
        print(printable_lines(f"\n{parts}"))
    if args.out:
        from mmm_lab.runs.curves import save_curves

        # A curve for each model.
        curves = defaultdict(list)
        for start in starts:
            curves[start.model].append((float(start.ranks), start.seconds))
        print(f"picture: {save_curves(curves, args.out)}")
    return 0


def _read(path: Path) -> tuple[LoggedStart, str]:
    """Read a run's folder or a log. Returns its start and, for a run, the table of its parts.

    Raises:
        UserError: it has no start.
    """
    if not path.is_dir():
        return read_log(path), ""
    config = read_json(path / "config.json", RecordError)
    # It may be anybody's, and hold anything under these names.
    try:
        hosts = [rank["host"] for rank in config["ranks"]]
        span = startup.span(config["startup"])
        if span is not None:
            start = LoggedStart(str(config["module"]), len(hosts), *span, str(path))
            return start, f"{path}\n{startup.table(config['startup'], hosts)}"
    except (TypeError, LookupError, AttributeError, ArithmeticError, OSError, ValueError):
        pass
    raise RecordError(
        f"{path}: its config.json has no start-up times that can be read: the run ended before its first step did, or "
        "its program does not train"
    )


def table(starts: Sequence[LoggedStart]) -> str:
    """Returns a line for each start: model, ranks, start, stop, seconds, log."""
    rows = [["model", "ranks", "start", "stop", "seconds", "log"]]
    for start in starts:
        seconds = f"{start.seconds:.2f}"
        # A log's times are in whole seconds.
        if not start.start.microsecond and not start.stop.microsecond:
            seconds = f"{start.seconds:.0f}"
        begin = f"{start.start:%Y-%m-%d %H:%M:%S}"
        end = f"{start.stop:%Y-%m-%d %H:%M:%S}"
        rows.append([start.model, str(start.ranks), begin, end, seconds, start.log])
    return "\n".join(in_columns(rows, NUMERIC))
