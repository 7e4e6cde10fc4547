"""A model of the package's that cannot fit into the memory that is there is refused before the ranks meet."""

from __future__ import annotations

from mmm.parallel.footprint import check_fits, footprint_of
from mmm.trainer.config.resolve_plan import ParallelSpec
from mmm.trainer.run.core import Hook, Run


class MemoryCheck(Hook):
    def before(self, run: Run) -> None:
        spec = run.resolved
        if isinstance(spec, ParallelSpec) and not run.dry:
            footprint = footprint_of(spec.model, spec.optimizer, spec.techniques, spec.partition, spec.layout.pp)
            check_fits(footprint, run.layout, run.rank, run.device, run.precision)
