"""Refuses a model of the package's that cannot fit into the memory of a rank, before the ranks meet."""

from mmm.parallel.footprint import STATE, check_fits
from mmm.run.hook import Hook
from mmm.run.run import Run


class MemoryCheck(Hook):
    def before(self, run: Run) -> None:
        job = run.job
        # A program that parallelizes its model itself has no partition.
        if run.comm.dry or job is None or job.partition is None:
            return
        techniques = job.techniques
        parameters = job.partition.parameters(job.model, job.layout.pp, techniques.schedule)
        state = STATE[job.optimizer]
        check_fits(
            parameters,
            techniques,
            state,
            run.layout,
            run.rank,
            run.device,
            run.precision,
        )
