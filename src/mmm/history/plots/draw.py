"""``python -m mmm.history.plots.draw OUTDIR``: a run's summary, as a picture; in the terminal and in a file its loss,
and small plots of accuracy and of where a step's time went; in the terminal also its dataset, and how much was waiting.

A run draws them by a process of its own when it is over: what the pictures need, and what may go wrong with them, is
then no part of the run. ``mmm history RUN --plots`` draws every metric.
"""

import sys
from pathlib import Path

from mmm.errors import RecordError
from mmm.history.plots.files import plot_summary
from mmm.history.plots.own_work import waiting_text
from mmm.history.plots.series import main_loss
from mmm.history.plots.terminal import terminal_summary
from mmm.history.record.reader import load


def main(argv: list[str]) -> int:
    """Draw. Returns 0; 1 where there is no curve: a table of measurements, or a single row."""
    outdir = Path(argv[0])
    try:
        data = load(outdir)
    except RecordError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return 1
    loss = main_loss(data)
    if loss is None or data.sizes["draw"] < 2:
        return 1
    plot_summary(data, outdir)
    print(data, terminal_summary(data, loss), sep="\n\n")
    if (waiting := waiting_text(data)) is not None:
        print(f"waiting: {waiting}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
