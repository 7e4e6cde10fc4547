"""A model of the package's that cannot fit into the memory that is there is refused before the ranks meet."""

from __future__ import annotations

from mmm.parallel.footprint import STATE, Footprint, check_fits
from mmm.trainer.config.resolve_plan import ParallelSpec
from mmm.trainer.run.core import Hook, Run


class MemoryCheck(Hook):
    def before(self, run: Run) -> None:
        spec = run.resolved
        if isinstance(spec, ParallelSpec) and not run.dry:
            techniques = spec.techniques
            parameters = spec.partition.parameters(spec.model, spec.layout.pp, techniques.schedule)
            holds = Footprint(parameters, techniques.data_parallel, STATE[spec.optimizer], techniques.offload)
            check_fits(holds, run.layout, run.rank, run.device, run.precision)
