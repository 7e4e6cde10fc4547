"""``mmm runs [DIR]``: a table of the runs in a folder."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.errors import ConfigError, RecordError
from mmm.outside import printable, printable_lines
from mmm_lab.cli import decimal, show, told_apart, whole
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.written import write_json
from mmm_lab.columns import in_columns

if TYPE_CHECKING:
    from mmm_lab.runs.runs import Run

COLUMNS = ("name", "state", "started", "layout", "step", "loss", "val_loss", "rate", "hours", "device_hours", "flags")
NUMBERS = range(4, 10)  # columns that end at the right
HEADS = {"device_hours": "device-h", "rate": "mean rate"}
LONGEST_VALUE = 32  # characters of a flag's value
MOST_FLAGS = 8
EPILOG = """\
Hours are those of steps: start-up, validation and checkpoints are not in them; device-hours are hours × ranks. The rate
is tokens (t/s) or samples (s/s) a second over all steps. The flags are those whose values differ between these runs;
what is left to the program (None) is in --json alone.
"""


def main(argv: list[str]) -> int:
    """Print the table. Returns 0. Raises UserError for a column or a folder that is not there."""
    parser = Parser(
        prog="mmm runs",
        description="The runs in a folder: finished, failed, killed, and those that run.",
        epilog=EPILOG,
    )
    parser.add_argument("folder", nargs="?", default="outputs", metavar="DIR", help="searched (default: outputs)")
    parser.add_argument("--sort", default="name", metavar="COLUMN", help=f"one of {', '.join(COLUMNS[:-1])}")
    parser.add_argument("--reverse", action="store_true", help="the largest first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as well")
    args = parser.parse_args(argv)
    column = args.sort.replace("-", "_")
    if column not in COLUMNS[:-1]:
        raise ConfigError(f"--sort {printable(args.sort)}: there are the columns {', '.join(COLUMNS[:-1])}")

    from mmm_lab.runs.run_folders import run_folders
    from mmm_lab.runs.runs import read_run

    runs: list[Run] = []
    for folder in run_folders(args.folder, left_out):
        try:
            runs.append(read_run(folder))
        except RecordError as error:  # another program's config.json, or a damaged record: the others are shown
            left_out(error)
    if not runs:
        raise RecordError(f"{args.folder} holds no run. Give the folder that holds the runs, e.g. outputs.")
    rows = sorted(table(runs, Path(args.folder).expanduser()), key=lambda row: row["name"])
    known = [row[column] is not None and row[column] == row[column] for row in rows]  # nor NaN
    by_value = sorted(compress(rows, known), key=lambda row: row[column], reverse=args.reverse)
    rows = [*by_value, *compress(rows, map(not_, known))]
    show(printable_lines(text(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)) + "\n")
    write_json(args.json, rows)
    return 0


def left_out(error: Exception) -> None:
    """Say on stderr which folder is not shown, and why."""
    print(f"left out: {printable(' '.join(str(error).split()).split('. ')[0])}", file=sys.stderr)


def table(runs: Sequence[Run], root: Path) -> list[dict[str, Any]]:
    """A mapping a run, by `COLUMNS`, and what they are made of; None for what is not known."""
    from mmm.history.record.repository import commit_text
    from mmm_lab.runs.runs import differing, last

    flags = differing([run.flags for run in runs])
    rows = []
    for run in runs:
        rate = next((name for name in ("tps", "sps") if run.mean_rate(name) is not None), None)
        rows.append(
            {
                "name": _name(run, root),
                "folder": str(run.folder),
                "started": run.started,
                "ended": run.ended,
                "commit": commit_text(run.config.get("repository")),
                "state": run.ending.state,
                "error": run.ending.error,
                "layout": run.layout,
                "step": run.steps_done,
                "steps": run.steps,
                "loss": run.loss,
                "val_loss": last(run.rows.get("val_loss", run.rows.get("test_loss"))),
                "rate": run.mean_rate(rate) if rate else None,
                "rate_of": {"tps": "tokens", "sps": "samples"}.get(rate or ""),
                "hours": run.hours,
                "device_hours": run.device_hours,
                "flags": {name: run.flags[name] for name in flags if name in run.flags},
            }
        )
    return rows


def _name(run: Run, root: Path) -> str:
    """Its folder below `root`, and the name that it was given, where that is another."""
    folder = str(run.folder.relative_to(root)) if run.folder != root else str(root)
    return folder if run.name is None or run.folder.name.startswith(run.name) else f"{run.name} ({folder})"


def text(rows: Sequence[Mapping[str, Any]], width: int | None) -> str:
    """The table. `width`: of a terminal, at which lines are cut."""
    names = dict.fromkeys(name for row in rows for name in row["flags"])
    shown = {name: _flag(name, [row["flags"].get(name) for row in rows]) for name in names}
    flags = [[text for name in names if (text := shown[name][place])] for place in range(len(rows))]
    heads = [HEADS.get(name, name) for name in COLUMNS]
    cells = [[*(_cell(row, name) for name in COLUMNS[:-1]), _flags(of)] for row, of in zip(rows, flags, strict=True)]
    lines = in_columns([heads, *cells], NUMBERS)
    if width is None:
        return "\n".join(lines)
    return "\n".join(line if len(line) <= width else f"{line[: max(width - 1, 1)]}…" for line in lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if value is None or value == "":
        return "-"
    if name == "started":
        return time.strftime("%m-%d %H:%M", time.localtime(value))
    if name == "step":
        return whole(value) if row["steps"] is None else f"{whole(value)}/{whole(row['steps'])}"
    if name == "rate":
        return f"{decimal(value, 0 if value >= 100 else 1)} {row['rate_of'][0]}/s"
    if name in ("hours", "device_hours"):
        return decimal(value, 1) if value >= 10 else f"{value:.2g}"
    return decimal(value, 4) if isinstance(value, float) else printable(str(value))


def _flag(name: str, values: Sequence[Any]) -> list[str]:
    """With its value in each run; empty where it has none."""
    texts = [printable(value if isinstance(value, str) else json.dumps(value)) for value in values if value is not None]
    short = iter(told_apart(texts, LONGEST_VALUE))
    return ["" if value is None else f"{printable(name)}={next(short)}" for value in values]


def _flags(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MOST_FLAGS} more" if len(texts) > MOST_FLAGS else ""
    return " ".join(texts[:MOST_FLAGS]) + more
