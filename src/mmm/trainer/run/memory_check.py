"""A model that cannot fit into the memory that is there is refused before the ranks meet."""

from __future__ import annotations

from mmm.parallel.footprint import check_fits
from mmm.trainer.run.core import Hook, Run


class MemoryCheck(Hook):
    def before(self, run: Run) -> None:
        if run.resolved.footprint is not None and not run.dry:
            check_fits(run.resolved.footprint, run.layout, run.rank, run.device, run.precision)
