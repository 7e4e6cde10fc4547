"""``mmm runs [DIR]``: a table of the runs in a folder."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.errors import RecordError
from mmm.outside import printable, printable_lines
from mmm_lab.cli import decimal, whole
from mmm_lab.cli.parser import STANDARD_OUTPUT, Parser
from mmm_lab.cli.written import write_json
from mmm_lab.columns import in_columns

if TYPE_CHECKING:
    from mmm_lab.runs.runs import Run

SORTED_BY = ("name", "state", "started", "layout", "step", "loss", "val_loss", "rate", "hours", "device_hours")
COLUMNS = (*SORTED_BY, "flags")
NUMERIC = range(4, 10)  # indices of the columns that are aligned to the right
HEADS = {"device_hours": "device-h", "rate": "mean rate"}
RATES = {"tps": "tokens", "sps": "samples"}  # column of a record → what it counts, a second
EPILOG = """\
Hours are those of steps: they leave out start-up, validation and checkpoints; device-hours are hours × ranks. The rate
is tokens (t/s) or samples (s/s) a second over all steps. The flags are those whose values differ between these runs;
those that were left to the program (None) are only in --json.

examples:
  mmm runs
  mmm runs outputs/lm --sort val_loss
  mmm runs outputs --json runs.json
exit codes: 0 shown, 2 wrong arguments, or a folder without runs
"""


def main(argv: list[str]) -> int:
    """Print the table. Returns 0. Raises UserError for a column or a folder that is not there."""
    parser = Parser(
        prog="mmm runs",
        description="List the runs in a folder: finished, failed, killed, and those that run.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "folder", nargs="?", default="outputs", metavar="DIR", type=Path, help="the folder to search (default: outputs)"
    )
    parser.add_argument("--sort", choices=SORTED_BY, default="name", metavar="COLUMN", help=", ".join(SORTED_BY))
    parser.add_argument("--reverse", action="store_true", help="the largest first")
    parser.add_json("the table")
    args = parser.parse_args(argv)
    column = args.sort

    from mmm_lab.runs.run_folders import run_folders
    from mmm_lab.runs.runs import read_run

    runs = []
    # Both readers say on stderr what they leave out.
    for folder in run_folders(args.folder, left_out):
        try:
            runs.append(read_run(folder))
        except RecordError as error:
            # Another program's config.json, or a damaged record: the others are shown.
            left_out(error)
    if not runs:
        raise RecordError(f"{args.folder} holds no run. Give the folder that holds the runs, e.g. outputs.")
    # By name first: runs that are equal in the column keep that order.
    rows = sorted(table(runs, args.folder), key=lambda row: row["name"])
    # None and NaN, which is not equal to itself, cannot be sorted: those rows come last.
    known = [row for row in rows if row[column] is not None and row[column] == row[column]]
    unknown = [row for row in rows if row not in known]
    known.sort(key=lambda row: row[column], reverse=args.reverse)
    rows = [*known, *unknown]
    if args.json != STANDARD_OUTPUT:
        width = None
        # A pipe and a file get whole lines.
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
        print(printable_lines(text(rows, width)))
    write_json(args.json, rows)
    return 0


def left_out(error: Exception) -> None:
    """Say on stderr which folder is not shown, and why."""
    # Its first sentence, in one line.
    message, *_ = " ".join(str(error).split()).split(". ")
    print(f"left out: {printable(message)}", file=sys.stderr)


def table(runs: Sequence[Run], root: Path) -> list[dict[str, Any]]:
    """Returns a mapping for each run, by `COLUMNS`, with what they are made of. What is not known is None."""
    from mmm_lab.runs.runs import differing, last

    # What all runs have in common would only make the table wide.
    flags = differing([run.flags for run in runs])
    rows = []
    for run in runs:
        # Tokens where it has them, else samples.
        rates = {name: run.mean_rate(name) for name in RATES}
        rate_name = next((name for name, rate in rates.items() if rate is not None), "")
        own_flags = {name: run.flags[name] for name in flags if name in run.flags}
        # Programs that test, and do not validate, have their loss in this column.
        val_loss = last(run.rows.get("val_loss", run.rows.get("test_loss")))
        rows.append(
            {
                "name": _name(run, root),
                "folder": str(run.folder),
                "started": run.started,
                "state": run.ending.state,
                "error": run.ending.error,
                "layout": run.layout,
                "step": run.steps_done,
                "steps": run.steps,
                "loss": run.loss,
                "val_loss": val_loss,
                "rate": rates.get(rate_name),
                "rate_of": RATES.get(rate_name),
                "hours": run.hours,
                "device_hours": run.device_hours,
                "flags": own_flags,
            }
        )
    return rows


def _name(run: Run, root: Path) -> str:
    """Returns the run's folder below `root`, and the name that it was given, where that is another."""
    folder = str(root)
    if run.folder != root:
        folder = str(run.folder.relative_to(root))
    # A run with a name has a folder of that name, if nobody has moved it.
    if run.name is None or run.folder.name.startswith(run.name):
        return folder
    return f"{run.name} ({folder})"


def text(rows: Sequence[Mapping[str, Any]], width: int | None) -> str:
    """Returns the table as text.

    Args:
        width: columns of the terminal, at which lines are cut. None: they are not.
    """
    table_rows = [[HEADS.get(name, name) for name in COLUMNS]]
    for row in rows:
        cells = [_cell(row, name) for name in SORTED_BY]
        flags = []
        for name, value in row["flags"].items():
            # An empty list is the default of a flag that takes several values.
            if value not in (None, []):
                shown = value if isinstance(value, str) else json.dumps(value)
                flags.append(printable(f"{name}={shown}"))
        table_rows.append([*cells, " ".join(flags)])
    lines = []
    for line in in_columns(table_rows, NUMERIC):
        if width is not None and len(line) > width:
            # Room for the ellipsis.
            line = line[: max(width - 1, 1)] + "…"
        lines.append(line)
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if value is None or value == "":
        return "-"
    if name == "started":
        return time.strftime("%m-%d %H:%M", time.localtime(value))
    if name == "step" and row["steps"] is not None:
        return f"{whole(value)}/{whole(row['steps'])}"
    if name == "step":
        return whole(value)
    if name == "rate":
        digits = 1
        if value >= 100:
            digits = 0
        # t/s or s/s
        return f"{decimal(value, digits)} {row['rate_of'][0]}/s"
    if name in ("hours", "device_hours"):
        # Of a short run two digits that count.
        return decimal(value, 1) if value >= 10 else f"{value:.2g}"
    if isinstance(value, float):
        return decimal(value, 4)
    return printable(str(value))
