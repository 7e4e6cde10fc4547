"""How fast a run is: the rates of a row, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass

from mmm.plan.utilization import peak_flops, step_flops
from mmm.trainer.resolve import ResolvedPlan
from mmm.trainer.run import Run

LEGEND = """a row's columns
iter         optimizer step, from 0
loss         of the global batch, on which the step is made: the training loss
dt           seconds of the step; of them dtd for data, dtf forward, dtb backward, dto clipping and optimizer, and in a
             pipeline dtw waiting
lr           learning rate of the step; of parameters with several the largest
grad_norm    2-norm of the full gradient before it is clipped
val_loss     mean loss of the validation batches; val_bpb the same in bits a byte of text
sps, tps     samples and tokens a second, of all ranks; sps_per_gpu, tps_per_gpu a rank
mfu          model FLOPs utilisation: FLOPs of the model's matrix products a second, of the devices' peak"""


@dataclass(frozen=True)
class Utilization:
    """What a program that trains a language model says of its speed beside samples and tokens a second.

    Attributes:
        ranks: of the run. flops: of a sample, forward and backward. peak: FLOP/s of a rank's device. source: of `peak`.
    """

    ranks: int
    flops: float
    peak: float
    source: str

    def rates(self, samples: int, tokens: int, seconds: float) -> dict[str, float]:
        each = seconds * self.ranks
        return {
            "sps_per_gpu": samples / each,
            "tps_per_gpu": tokens / each,
            "mfu": samples * self.flops / (each * self.peak),
        }


def measure_utilization(run: Run, resolved: ResolvedPlan) -> None:
    """Have the run's rows say how well its devices are used, and its record say of what; before the model is consumed.
    Costs rank 0 some tenths of a second, and the others nothing; in a later attempt of a launch, which goes by what the
    first has measured, nothing."""
    if not run.rank.is_main:
        return
    if known := run.config.get("mfu"):
        flops, peak, source = (known[name] for name in ("flops_per_sample", "peak_flops_per_rank", "peak"))
    else:
        flops = step_flops(resolved.model, resolved.plan, resolved.sample)
        peak, source = peak_flops(run.device, run.precision.compute)
    run.utilization = Utilization(run.rank.world_size, flops, peak, source)
    run.describe(mfu={"flops_per_sample": flops, "peak_flops_per_rank": peak, "peak": source})
    run.log.info("%s; peak: %.4g TFLOP/s a rank (%s)", LEGEND, peak / 1e12, source)
