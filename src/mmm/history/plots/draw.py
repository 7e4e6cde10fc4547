"""``python -m mmm.history.plots.draw OUTDIR``: a run's summary, as a picture; in the terminal and in a file its loss.

A run draws them by a process of its own when it is over: what the pictures need, and what may go wrong with them, is
then no part of the run. The terminal has its dataset as well, and how much was waiting.
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
    """Draw. Returns 0; 1 where there is no picture: of a table of measurements, of a single row, or of a failure."""
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
        print(f"waiting: {waiting}")
    return 0 if any(path.suffix == ".png" for path in written) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
