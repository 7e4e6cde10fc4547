"""Pictures of a run's rows once it is over, and its loss in the terminal."""

from __future__ import annotations

from mmm import history
from mmm.trainer.run.core import Hook, Run


class Plots(Hook):
    """Draws what the record has. It stands after the record, which is complete by then."""

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is not None or run.outdir is None or not run.options.plots:
            return
        data = history.load(run.outdir)
        loss = next((name for name in ("loss", "train_loss") if name in data), None)
        if loss is None or len(data.draw) < 2:
            return  # a table of measurements, or a single row, is no curve
        history.plot_all(data, run.outdir)
        print(history.terminal_plot(data, loss), flush=True)
        run.log.info("pictures: %s", run.outdir / "plots" / "mplot" / "pngs" / "summary.png")
