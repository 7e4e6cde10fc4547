"""A model of the package's that cannot fit into the memory that is there is refused before the ranks meet."""

from __future__ import annotations

from mmm.parallel.footprint import STATE, Footprint, check_fits
from mmm.parallel.memory.offload import disk_of
from mmm.trainer.config.resolve_plan import ParallelSpec
from mmm.trainer.run.core import Hook, Run


class MemoryCheck(Hook):
    def before(self, run: Run) -> None:
        spec = run.resolved
        if isinstance(spec, ParallelSpec) and not run.dry:
            techniques = spec.techniques
            parameters = spec.partition.parameters(spec.model, spec.layout.pp, techniques.schedule)
            state, disk = STATE[spec.optimizer], disk_of(techniques.offload)
            if disk is not None:
                from mmm.parallel.memory.disk import check_disk  # such a run only

                check_disk(disk)
                state = 0
            holds = Footprint(parameters, techniques.data_parallel, state, bool(techniques.offload))
            check_fits(holds, run.layout, run.rank, run.device, run.precision)
