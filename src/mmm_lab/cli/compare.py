"""``mmm compare A B …``: what differs between runs, and a metric of all of them in one plot."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmm.errors import ConfigError, RecordError
from mmm.outside import printable, printable_lines
from mmm_lab.cli import show, told_apart
from mmm_lab.cli.parser import Parser

if TYPE_CHECKING:
    from mmm_lab.runs.runs import Run

USUAL = ("loss", "train_loss", "val_loss", "test_loss")
GROUPS = ("versions", "data", "model", "techniques")  # of config.json, each a mapping
SINGLE = ("module", "layout", "global_batch_size", "steps", "parameters", "python")
NOT_ASKED = "-"
LONGEST_CELL = 34  # characters


def main(argv: list[str]) -> int:
    """Print what differs and the plot. Returns 0. Raises UserError."""
    parser = Parser(prog="mmm compare", description="What differs between runs, and a metric of all in one plot.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the folders of two runs or more")
    parser.add_argument("--metric", help="what to plot (default: loss, or else the first that all have)")
    parser.add_argument(
        "--by", choices=("step", "tokens", "hours"), default="step", help="against what (default: step)"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the plot to DIR as PNG and SVG as well")
    parser.add_argument("--theme", choices=("light", "dark"), help="of the pictures of --plots (default: light)")
    args = parser.parse_args(argv)
    if args.theme and not args.plots:
        raise ConfigError(f"--theme {args.theme} without --plots: nothing is drawn; give both")
    from mmm_lab.runs.overlay import LETTERS, common_metrics, overlaid, save_overlay, terminal_overlay
    from mmm_lab.runs.run_folders import names_of
    from mmm_lab.runs.runs import read_run

    if not 2 <= len(args.runs) <= len(LETTERS):
        raise ConfigError(f"mmm compare takes 2 to {len(LETTERS)} runs, and {len(args.runs)} is given")
    runs = [read_run(folder.expanduser(), columns=None) for folder in args.runs]
    names = names_of(runs)
    show(printable_lines(difference_table(runs, names)) + "\n")
    common = common_metrics(runs)
    metric = args.metric or next((name for name in (*USUAL, *common) if name in common), None)
    if metric is None:
        raise RecordError("these runs have no metric in common: there is no plot")
    curves = overlaid(runs, metric, args.by)
    width, height = shutil.get_terminal_size((100, 30))
    show("\n" + printable_lines(terminal_overlay(curves, names, min(width, 120), max(12, min(height - 10, 22)))))
    for letter, name, run in zip(LETTERS, names, runs, strict=False):
        if metric == run.loss_name and run.loss is not None and math.isnan(run.loss):
            print(f"  {letter} {printable(name)}: its newest {metric} is not finite")
    if args.plots:
        paths = save_overlay(curves, names, args.plots, args.theme or "light")
        print("pictures: " + ", ".join(printable(str(path)) for path in paths))
    return 0


def facts(run: Run) -> dict[str, Any]:
    """What can differ between runs, by name: the flags with their dashes."""
    from mmm.history.record.repository import commit_text

    result: dict[str, Any] = {name: run.config.get(name) for name in SINGLE}
    result |= {"state": run.ending.state, "ranks": run.ranks, "commit": commit_text(run.config.get("repository"))}
    precision = run.config.get("precision")
    result["precision"] = precision.get("name") if isinstance(precision, dict) else None
    for group in GROUPS:
        values = run.config.get(group)
        if isinstance(values, dict):
            result |= {f"{group}.{name}": value for name, value in values.items()}
    return result | {f"--{name}": value for name, value in run.flags.items()}


def difference_table(runs: Sequence[Run], names: Sequence[str]) -> str:
    """A line for each thing that differs, a column a run; the letters are those of the plot."""
    from mmm_lab.runs.overlay import LETTERS

    of = [facts(run) for run in runs]
    known = dict.fromkeys(name for each in of for name in each)
    different = [name for name in known if len({repr(each.get(name)) for each in of}) > 1]
    head = ["", *(f"{letter} {name}" for letter, name in zip(LETTERS, names, strict=False))]
    cells = {name: told_apart([_cell(each.get(name)) for each in of], LONGEST_CELL) for name in different}
    lines = [head, *([name, *cells[name]] for name in different)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    text = ["  ".join(f"{cell:<{size}}" for cell, size in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(text if different else [*text, "nothing that is recorded differs"])


def _cell(value: Any) -> str:
    if value is None:
        return NOT_ASKED
    return " ".join((value if isinstance(value, str) else json.dumps(value)).split())
