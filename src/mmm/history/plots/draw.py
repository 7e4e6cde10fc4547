"""Draws a run's summary as a picture, and its loss in the terminal and in a file.

Command: ``python -m mmm.history.plots.draw OUTDIR``. It also prints the run's dataset, and how long ranks have waited.

A run starts this command in a process of its own when it is over. So what the pictures need, and what may go wrong with
them, does not concern the run.
"""

import sys
from pathlib import Path

from mmm.errors import RecordError
from mmm.history.plots.files import plot_summary
from mmm.history.plots.own_work import waiting_text
from mmm.history.plots.series import main_loss
from mmm.history.plots.terminal import terminal_plot
from mmm.history.record.reader import load


def main(argv: list[str]) -> int:
    """Draw the run in the folder ``argv[0]``.

    Returns:
        0; or 1 if there is no picture, because the record is a table of measurements, has a single row, or because
        drawing has failed.
    """
    outdir = Path(argv[0])
    try:
        data = load(outdir)
    except RecordError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return 1
    loss = main_loss(data)
    if loss is None or data.sizes["draw"] < 2:
        return 1
    written = plot_summary(data, outdir)
    print(data, terminal_plot(data, loss), sep="\n\n")
    waiting = waiting_text(data)
    if waiting is not None:
        print(f"waiting for other ranks: {waiting}")
    has_picture = any(path.suffix == ".png" for path in written)
    return 0 if has_picture else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
