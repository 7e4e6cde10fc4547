"""How fast a run is: the rates of a row, and its model FLOPs utilisation, which is what a step's matrix products need
over what the devices could compute in its time.

Source: Chowdhery et al., "PaLM", 2022, appendix B: a model's own FLOPs, so that recomputing activations does not count.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from mmm.parallel.plan import Plan
from mmm.parallel.pp.stages import part_costs, parts_of
from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime.peaks import named_peak

SIZE = 1024  # of the square matrices that are measured


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
        """Costs rank 0 some tenths of a second, and the others nothing."""
        if not run.rank.is_main:
            return
        job = run.job
        self.flops = step_flops(job.model, job.plan, job.sample)
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


def step_flops(model: nn.Module, plan: Plan, inputs: Tensor) -> float:
    """FLOPs of forward and backward of one sample: 3 times those of the forward's matrix products. Of attention all
    scores count, also those that a causal kernel leaves out.

    Args:
        model: full, on the meta device. inputs: a batch, on the meta device.
    """
    return 3 * sum(part_costs(model, parts_of(model, plan), inputs)) / len(inputs)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """FLOP/s of one device at most, and where the number comes from: the table, or on a CPU a product measured here.
    None for an accelerator that the table does not have.

    Args:
        dtype: of the matrix products.
    """
    name = ""
    if device.type in ("cuda", "xpu"):
        name = getattr(torch, device.type).get_device_name(device)
    short = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    if dtype in short and (known := named_peak(name, short[dtype])) is not None:
        return known, f"{name}: table, {'bfloat16' if short[dtype] == 'bf16' else str(dtype)[6:]}, dense"
    if device.type != "cpu":
        return None, f"{name or device.type}: not in the table of `mmm.runtime.peaks`"
    if dtype not in (torch.float32, torch.float64):
        dtype = torch.float32  # narrower types are emulated
    return measured_flops(dtype), f"cpu: measured, a product of {SIZE}² {str(dtype)[6:]}"


def measured_flops(dtype: torch.dtype, tries: int = 3) -> float:
    """FLOP/s of a product of square matrices on the CPU, with the threads that this rank has: the best of some."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    best = 0.0
    for attempt in range(tries + 1):
        begin = time.perf_counter()
        a @ a
        if attempt:
            best = max(best, 2 * SIZE**3 / (time.perf_counter() - begin))
    return best
