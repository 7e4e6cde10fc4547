"""``mmm history OUTDIR``: what a run did, from its record, while it runs or after it ended."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmm.errors import ConfigError
from mmm.outside import printable, printable_lines
from mmm.units import counted
from mmm_lab.cli import decimal, whole
from mmm_lab.cli.history_progress import RECENT_ROWS, progress
from mmm_lab.cli.history_ranks import a_row_of, ranks_text, slowest_text
from mmm_lab.cli.parser import Parser

if TYPE_CHECKING:
    import xarray

    from mmm.history.plots.series import Series

EPILOG = """\
examples:
  mmm history outputs/lm/2026-01-01-120000
  mmm history runs/a --metric val_loss
  mmm history runs/a --ranks
exit codes: 0 shown, 2 wrong arguments, or a record that is not there or cannot be read
"""
LOSSES = ("loss", "train_loss", "val_loss", "test_loss")


def main(argv: list[str]) -> int:
    """Print a run's summary and one metric's plot. Returns 0. Raises UserError where the user can fix it."""
    parser = Parser(
        prog="mmm history",
        description="Show the record of a run that has finished, failed or been killed, or that runs.",
        epilog=EPILOG,
    )
    parser.add_argument("outdir", metavar="RUN", type=Path, help="the run's folder, e.g. outputs/<module>/<timestamp>")
    parser.add_argument(
        "--metric", metavar="NAME", help="what to plot in the terminal (default: loss, or else the first there is)"
    )
    parser.add_argument("--finalize", action="store_true", help="make train_dataset.h5 from a killed run's journal")
    parser.add_argument("--plots", action="store_true", help="draw the run's summary as PNG and SVG, to RUN/plots")
    parser.add_argument("--ranks", action="store_true", help="each rank's own work, and the slowest rank")
    args = parser.parse_args(argv)
    if args.ranks and (args.plots or args.metric):
        other = "--plots" if args.plots else "--metric"
        raise ConfigError(f"--ranks draws no plots of metrics: leave {other} out")

    from mmm.history import finalize, load, plot_summary, terminal_plot
    from mmm.history.plots.series import metrics
    from mmm.history.record.ending import RUNNING
    from mmm_lab.runs.runs import run_of

    if args.finalize:
        print(f"finalized: {printable(str(finalize(args.outdir)))}")
    ds = load(args.outdir)
    if args.ranks:
        columns = shutil.get_terminal_size((120, 30)).columns
        print(ranks_text(ds, min(columns, 160)))
        return 0
    run = run_of(args.outdir, ds)
    newest = ds
    if run.ending.state == RUNNING:
        # Which rank is slow now: early rows would hide one that became slow.
        newest = ds.isel(draw=slice(-RECENT_ROWS - 1, None))
    table = summary(ds, str(run.ending))
    table += progress(run)
    table.append(("slowest", slowest_text(newest)))
    lines = [str(args.outdir)]
    for name, text in table:
        if text:
            lines.append(f"  {name:<11}{text}")
    # A record may have anybody's text in it: on a terminal it moves no cursor.
    print(printable_lines("\n".join(lines)))
    metric = args.metric or _main_metric(metrics(ds))
    if metric and ds.sizes["draw"]:
        width, height = shutil.get_terminal_size((100, 30))
        # 16 lines are left for the summary above it.
        plot_height = max(12, min(height - 16, 24))
        plot = terminal_plot(ds, metric, min(width, 140), plot_height)
        print(f"\n{plot}", end="")
    if args.plots:
        written = plot_summary(ds, args.outdir, (".png", ".svg"))
        line = f"{counted(len(written), 'plot')} in {args.outdir}/plots"
        if written:
            line += f", first {written[0]}"
        print(printable(line))
    return 0


def _main_metric(names: list[str]) -> str:
    """Returns the metric that is plotted if the user names none. Empty: there is none."""
    if "loss" in names:
        return "loss"
    return next(iter(names), "")


def summary(ds: "xarray.Dataset", state: str) -> list[tuple[str, str]]:
    """Returns the lines of the table: name and text; a line without a text is left out."""
    from mmm.history.plots.own_work import waiting_text
    from mmm.history.plots.series import PART_NAMES, facts, metrics, series
    from mmm.history.record.journal import LEFT_OUT

    # Metrics with a number in some row.
    known = {}
    for metric in metrics(ds):
        column = series(ds, metric)
        if np.isfinite(column.y).any():
            known[metric] = column
    # Seconds and rates of single steps vary: a mean would follow the slowest.
    medians = {}
    for metric, column in known.items():
        medians[metric] = np.nanmedian(column.y)
    n_rows = ds.sizes["draw"]
    table = [
        ("state", state),
        ("size", facts(ds)),
        ("data", data_of(ds)),
    ]
    for name in ("iter", "epoch"):
        if name in ds and n_rows:
            counter = ds[name].values
            first = whole(counter[0])
            last = whole(counter[-1])
            table.append((name, f"{first} to {last}"))
    for name in (*LOSSES, "test_acc"):
        if name in known:
            table.append((name, _course(known[name])))
    if "dt" in known:
        of_rows = counted(n_rows, "row")
        text = f"{medians['dt']:.6f} s {a_row_of(ds)}, median of {of_rows}"
        # The first row includes warm-up.
        first_row = known["dt"].y[0]
        table.append(("dt", f"{text}; the first took {first_row:.6f} s"))
    parts = []
    for name in PART_NAMES:
        if name in known:
            parts.append(f"{name} {medians[name]:.6f} s")
    table.append(("parts", ", ".join(parts)))
    waiting = waiting_text(ds)
    if waiting:
        table.append(("waiting", f"for other ranks: {waiting}"))
    for name in ("tps", "sps"):
        if name in known:
            table.append((name, f"{medians[name]:,.1f} {known[name].unit}, median"))
    # Lines that a killed run has left torn.
    table.append(("journal", ds.attrs.get(LEFT_OUT, "")))
    return table


def _course(metric: "Series") -> str:
    """Returns a metric's last value, its first and its best; for the loss also how many rows lack it."""
    finite = np.flatnonzero(np.isfinite(metric.y))
    values = metric.y[finite]
    digits = 6
    best = "lowest"
    best_row = finite[np.argmin(values)]
    if metric.name == "test_acc":
        digits = 2
        best = "highest"
        best_row = finite[np.argmax(values)]
    first = decimal(values[0], digits)
    extreme = decimal(metric.y[best_row], digits)
    place = f"{metric.x_name} {whole(metric.x[best_row])}"
    text = f"{decimal(values[-1], digits)} (first {first}, {best} {extreme} at {place}"
    missing = len(metric.y) - len(finite)
    # A loss that is not a number any more is the first thing to know of a run.
    if metric.name == "loss" and missing:
        text += f", {counted(missing, 'row')} without"
        last = finite[-1]
        if last < len(metric.y) - 1:
            text += f": none since {metric.x_name} {whole(metric.x[last])}"
    return f"{text})"


def data_of(ds: "xarray.Dataset") -> str:
    """Says what the run was trained on; empty where the record does not."""
    from mmm.history.plots.series import config_of

    data = config_of(ds).get("data")
    if not isinstance(data, dict) or not data.get("dataset"):
        return ""
    text = str(data["dataset"])
    if data.get("source"):
        text += f", {data['source']}"
    return text
