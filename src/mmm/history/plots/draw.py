"""``python -m mmm.history.plots.draw OUTDIR``: pictures of a run's rows, and in the terminal its dataset, its loss, and
small plots of its accuracy and of where a step's time went, and how much of it was waiting.

A run draws them by a process of its own when it is over: what the pictures need, and what may go wrong with them, is
then no part of the run.
"""

import sys
from pathlib import Path

from mmm.errors import RecordError
from mmm.history.plots.files import plot_all
from mmm.history.plots.terminal import side_by_side, terminal_plot
from mmm.history.record.reader import load
from mmm.history.waiting import waiting_text

SMALL = ("test_acc", "val_loss", "dt", "dtf", "dtb")


def main(argv: list[str]) -> int:
    """Draw. Returns 0; 1 where there is no curve: a table of measurements, or a single row."""
    outdir = Path(argv[0])
    try:
        data = load(outdir)
    except RecordError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return 1
    loss = next((name for name in ("loss", "train_loss") if name in data), None)
    if loss is None or data.sizes["draw"] < 2:
        return 1
    plot_all(data, outdir)
    small = [name for name in SMALL if name in data or f"{name}_median" in data][:4]
    print(data, terminal_plot(data, loss), side_by_side(data, small), sep="\n\n")
    if (waiting := waiting_text(data)) is not None:
        print(f"waiting: {waiting}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
