"""A picture of the trace that --profile has left (`mmm.trainer.loop.profile`)."""

from __future__ import annotations

from mmm.history.record.folder import TRACE, TRACE_PICTURE
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.record import draws_plots


class TracePicture(Hook):
    def end(self, run: Run, error: BaseException | None) -> None:
        if error is not None or run.outdir is None or not draws_plots(run) or not (run.outdir / TRACE).exists():
            return
        from mmm.profile.trace_picture import draw_trace  # a run with --profile only

        try:
            run.log.info("picture of the trace: %s", draw_trace(run.outdir / TRACE, run.outdir / TRACE_PICTURE))
        except Exception as problem:  # whatever is wrong with it, the run is over and well
            run.log.warning("the trace could not be drawn: %s", problem)
