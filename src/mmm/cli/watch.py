"""``mmm watch DIR …``: runs while they run: their curve, the time left, how old the last row and checkpoint are."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmm.cli import decimal, show, whole
from mmm.cli.compare import USUAL
from mmm.cli.parser import Parser
from mmm.cli.runs import left_out
from mmm.errors import ConfigError, RecordError
from mmm.outside import printable_lines
from mmm.units import duration

if TYPE_CHECKING:
    from mmm.history.runs import Run

RECENT_ROWS = 50  # whose mean is the time of the steps that are left
SILENT = 60.0  # s without a row, from which on a run is silent,
SILENT_STEPS = 10  # if it is that many steps as well
BUSY = 0.2  # the part of the time that reading may take
CLEAR, HOME, TO_LINE_END, TO_END = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
EPILOG = """\
A folder that is no run stands for the runs below it that are running. It ends when all runs have ended, and no job of a
campaign (mmm submit --until-done) is to come, or by Ctrl-C, with exit code 0. On a pipe it prints a line for each run
at a time. The time left is that of steps, without validation.
"""


def main(argv: list[str]) -> int:
    """Show runs until they have ended. Returns 0. Raises UserError for a folder that is not there, or no run."""
    parser = Parser(
        prog="mmm watch",
        description="Follow runs while they run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="a run's folder, or one that holds runs")
    parser.add_argument("--metric", help="what to plot (default: loss, or else the first that all have)")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks (default: 5)")
    parser.add_argument("--once", action="store_true", help="print once, and end")
    args = parser.parse_args(argv)
    if not 0 < args.every <= 86400:
        raise ConfigError(f"--every {args.every:g}: it must be above 0 and at most 86400 s")
    try:
        return _watch(args.folders, args.metric, args.every, args.once)
    except KeyboardInterrupt:
        print()
        return 0


def _watch(folders: Sequence[Path], metric: str | None, every: float, once: bool) -> int:
    from mmm.campaign.chain import goes_on

    redraw = sys.stdout.isatty() and not once
    seen: list[Path] = []
    said: set[Path] = set()
    while True:
        began = time.monotonic()
        runs = _runs(folders, seen, said)
        width, height = shutil.get_terminal_size((100, 30))
        text = "\n".join(status_lines(runs))
        if redraw or once:
            try:
                text = frame(runs, metric, width, height)
            except RecordError as error:
                if once:
                    raise
                text += f"\n{error}"  # a metric may come with a later row
        text = printable_lines(text)
        if redraw:
            lines = [line[:width] for line in text.split("\n")[: height - 1]]  # more would scroll
            text = (HOME if seen else CLEAR + HOME) + "".join(f"{line}{TO_LINE_END}\n" for line in lines) + TO_END
        show(text if redraw else f"{text}\n")
        sys.stdout.flush()
        going = [run for run in runs if run.ending.state == "running" or goes_on(run.folder)]
        if once or (runs and not going):
            return 0
        seen = [run.folder for run in runs]
        time.sleep(max(every, (time.monotonic() - began) * (1 / BUSY - 1)))


def _runs(folders: Sequence[Path], seen: Sequence[Path], said: set[Path]) -> list[Run]:
    """The runs that are named, and those below other folders that run, or wait for a job, or did at an earlier look.

    Args:
        said: folders of which it has been said why they are left out; others are added.
    """
    from mmm.campaign.chain import goes_on
    from mmm.history.record.ending import RUNNING
    from mmm.history.record.folder import DATASET, JOURNAL
    from mmm.history.run_folders import run_folders
    from mmm.history.runs import read_run

    runs: dict[Path, Run] = {}
    ended = 0
    for given in folders:
        root = given.expanduser()
        for folder in run_folders(root):
            shown = folder in (root, *seen) or goes_on(folder)
            if not shown and (folder / DATASET).exists() and not (folder / JOURNAL).exists():
                ended += 1
                continue
            try:
                run = read_run(folder, columns=None)
            except RecordError as error:
                if folder == root:
                    raise
                if folder not in said:
                    left_out(error)
                said.add(folder)
                continue
            if shown or run.ending.state == RUNNING:
                runs[folder] = run
            else:
                ended += 1
    if not runs and not any(goes_on(given.expanduser()) for given in folders):
        names = ", ".join(map(str, folders))
        raise RecordError(f"no run in {names} is running ({ended} have ended). `mmm runs` shows those.")
    return list(runs.values())


def frame(runs: Sequence[Run], metric: str | None, width: int, height: int) -> str:
    """A line a run, and below it the curves of a metric that all have."""
    from mmm.history.plots.overlay import LETTERS, common_metrics, overlaid, terminal_overlay
    from mmm.history.run_folders import names_of

    lines = status_lines(runs)
    if not runs:
        return "\n".join(lines)
    begun = [run for run in runs if len(run.rows.get("draw", ()))][: len(LETTERS)]
    common = common_metrics(begun) if begun else []
    name = metric or next((name for name in (*USUAL, *common) if name in common), None)
    if name is None:
        return "\n".join([*lines, "no rows yet" if not begun else "no metric in common: there is no plot"])
    curves = overlaid(begun, name)
    most = max(8, min(height - len(lines) - len(begun) - 3, 22))
    return "\n".join([*lines, "", terminal_overlay(curves, names_of(begun), width, most).rstrip()])


def status_lines(runs: Sequence[Run]) -> list[str]:
    """A line a run, in columns, and one for each whose ranks wait for one of them, or that can no longer save."""
    from mmm.history.run_folders import names_of

    if not runs:
        return ["no row yet: the first job waits in the queue, or starts"]
    names = names_of(runs)
    cells = [_status(run, name) for run, name in zip(runs, names, strict=True)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True) if width).rstrip()
        for line in cells
    ]
    more = [(name, said) for name, run in zip(names, runs, strict=True) for said in (slowest(run), unsaved(run))]
    return [*lines, *(f"{name}: {said}" for name, said in more if said)]


def _status(run: Run, name: str) -> list[str]:
    from mmm.campaign.chain import goes_on
    from mmm.history.record.ending import RUNNING
    from mmm.history.runs import last

    running = run.ending.state == RUNNING
    step = "starts" if run.steps_done is None and running else whole(run.steps_done or 0)
    of = f" of {whole(run.steps)}" if run.steps and run.steps_done is not None else ""
    values = {metric: last(run.rows.get(metric)) for metric in USUAL}
    values |= {run.loss_name: run.loss} if run.loss_name else {}
    losses = [f"{metric} {decimal(value, 4)}" for metric, value in values.items() if value is not None]
    rate = next((rate for rate in ("tps", "sps") if last(run.rows.get(rate))), None)
    speed = f"{decimal(last(run.rows[rate]) or 0.0, 0)} {'tokens' if rate == 'tps' else 'samples'}/s" if rate else ""
    left = seconds_left(run) if running else None
    ended = f" {duration(max(time.time() - run.ended, 0.0))} ago" if not running and run.ended else ""
    ended += ", waits for its next job" if not running and goes_on(run.folder) else ""
    cells = [
        name,
        f"{run.ending}{ended}" if not running else "running",
        f"{run.row_of} {step}{of}",
        " ".join(losses),
        speed,
    ]
    return [*cells, f"{duration(left)} left" if left is not None else "", _age(run) if running else "", checkpoint(run)]


def seconds_per_step(run: Run) -> float | None:
    """The mean of the last rows, without the first of all, which starts what is slow to start; None before a row."""
    dt = run.rows.get("dt")
    if dt is None:
        return None
    timed = dt[np.isfinite(dt)]
    recent = timed[1:][-RECENT_ROWS:] if len(timed) > 1 else timed
    return float(np.mean(recent)) if len(recent) else None


def seconds_left(run: Run) -> float | None:
    """For the steps that are left, at the time of the last rows; None where it is not known."""
    each = seconds_per_step(run)
    if each is None or run.steps is None or run.steps_done is None:
        return None
    return max(run.steps - run.steps_done, 0.0) * each


def _age(run: Run) -> str:
    """How long ago the last row came, by the time of the journal."""
    from mmm.history.record.folder import JOURNAL

    try:
        age = max(time.time() - (run.folder / JOURNAL).stat().st_mtime, 0.0)
    except OSError:  # not begun, or ended meanwhile
        return ""
    silent = age > max(SILENT, SILENT_STEPS * (seconds_per_step(run) or 0.0))
    return f"silent for {duration(age)}" if silent else f"written {duration(age)} ago"


def checkpoint(run: Run) -> str:
    """The last checkpoint that is complete, and its age."""
    from mmm.checkpoint.manifest import steps_of

    try:
        newest = steps_of(run.folder / "checkpoints")[0]
        return f"{newest.name} saved {duration(max(time.time() - newest.stat().st_mtime, 0.0))} ago"
    except (OSError, IndexError):
        return ""


def unsaved(run: Run) -> str:
    """That its last checkpoint has failed, as its notes say; empty where none has failed since one was saved."""
    from mmm.checkpoint.manifest import steps_of

    notes = run.config.get("notes")
    texts = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    failed = [
        (int(found[1]), note) for note in texts if (found := re.match(r"no checkpoint of step (\d{1,18}): ", note))
    ]
    try:
        newest = int(steps_of(run.folder / "checkpoints")[0].name.rpartition("-")[2])
    except (OSError, IndexError):
        newest = -1
    return failed[-1][1] if failed and failed[-1][0] > newest else ""


def slowest(run: Run) -> str:
    """The rank, or host, that the others wait for in the last rows; empty where there is none, or it is not known."""
    from mmm.cli.history_ranks import a_row_of
    from mmm.history.own_work import slow

    work = run.own_work(RECENT_ROWS + 1)
    if work is None or (found := slow(work, hosts := run.hosts)) is None:
        return ""
    host = f" on {hosts[found.rank]}" if found.rank < len(hosts) else ""
    who = f"host {hosts[found.rank]}" if found.is_host else f"rank {found.rank}{host}"
    return f"{who} is slow: {found.over:.2g} of {found.step:.2g} s {a_row_of(run.rows)}"
