"""How fast a run is: the rates of a row, and what they are called."""

from __future__ import annotations

from mmm.trainer.config.resolve_plan import ParallelSpec
from mmm.trainer.run.core import Hook, Run
from mmm.trainer.run.resume import ResumableRecord
from mmm.trainer.run.rows import Row


class Utilization(Hook):
    """Adds to each row, of a program that trains a language model, how well the devices are used. It stands before the
    record, and starts before the model is consumed.

    Attributes:
        flops: of a sample, forward and backward; 0 on ranks other than 0.
        peak: FLOP/s of a rank's device. None: it is not known, and rows have no mfu.
    """

    def __init__(self) -> None:
        self.flops = 0.0
        self.peak: float | None = None

    def start(self, run: Run) -> None:
        """Costs rank 0 some tenths of a second, and the others nothing; in a later attempt of a launch, which goes by
        what the first has measured, nothing."""
        if not run.rank.is_main:
            return
        from mmm.plan.utilization import peak_flops, step_flops  # every import of a trainer would pay for it

        record = run.hook(ResumableRecord)
        if record is not None and record.folder is not None and (known := record.folder.mfu):
            self.flops, self.peak, source = (
                known[name] for name in ("flops_per_sample", "peak_flops_per_rank", "peak")
            )
        else:
            resolved = run.resolved
            assert isinstance(resolved, ParallelSpec)
            self.flops = step_flops(resolved.model, resolved.plan, resolved.sample)
            self.peak, source = peak_flops(run.device, run.precision.compute)
        run.describe(mfu={"flops_per_sample": self.flops, "peak_flops_per_rank": self.peak, "peak": source})
        peak = f"{self.peak / 1e12:.4g} TFLOP/s a rank" if self.peak else "unknown, so that there is no mfu"
        run.log.info("mfu is of the peak: %s (%s)", peak, source)

    def row(self, run: Run, row: Row) -> None:
        if row.numbers and self.flops:
            rank_seconds = row.numbers["dt"] * run.rank.world_size
            row.numbers["sps_per_gpu"] = row.samples / rank_seconds
            row.numbers["tps_per_gpu"] = row.tokens / rank_seconds
            if self.peak:
                row.numbers["mfu"] = row.samples * self.flops / (rank_seconds * self.peak)
