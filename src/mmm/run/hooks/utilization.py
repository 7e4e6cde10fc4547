"""How fast a run is: the rates of a row, and its model FLOPs utilisation (MFU).

MFU is the number of FLOPs that the matrix products of a step need, over the number that the devices could make in its
time.

Source: Chowdhery et al., "PaLM", 2022, appendix B: only the model's own FLOPs count, not the recomputing of
activations.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from mmm.parallel.pp.stages import part_costs
from mmm.run.hook import Hook
from mmm.run.rows import Row
from mmm.run.run import Run
from mmm.runtime.peaks import named_peak

# Rows and columns of the square matrices whose product is timed.
SIZE = 1024
# Names of the columns of `mmm.runtime.peaks`. Devices have the same peak in both 16-bit types.
PEAK_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Utilization(Hook):
    """Adds to each row of a language model's trainer how well the devices are used.

    It comes before the record, and starts before the model is consumed.

    Attributes:
        flops: FLOPs of one sample, forward and backward; 0 on ranks other than 0.
        peak: peak FLOP/s of a rank's device. None: it is not known, and rows have no mfu.
    """

    def __init__(self) -> None:
        self.flops = 0.0
        self.peak: float | None = None

    def start(self, run: Run) -> None:
        """Count the FLOPs and find the peak. Costs rank 0 some tenths of a second, and the others nothing."""
        if not run.rank.is_main:
            return
        job = run.job
        self.flops = step_flops(job.model, job.sample)
        self.peak, source = peak_flops(run.device, run.precision.compute)
        run.describe(mfu={"flops_per_sample": self.flops, "peak_flops_per_rank": self.peak, "peak": source})
        peak = "unknown, so that there is no mfu"
        if self.peak:
            peak = f"{self.peak / 1e12:.4g} TFLOP/s a rank"
        run.log.info("mfu is of the peak: %s (%s)", peak, source)

    def row(self, run: Run, row: Row) -> None:
        # Only rank 0 has values.
        if row.values and self.flops:
            rank_seconds = row.values["dt"] * run.rank.world_size
            row.values["sps_per_gpu"] = row.samples / rank_seconds
            row.values["tps_per_gpu"] = row.tokens / rank_seconds
            if self.peak:
                flops_at_peak = rank_seconds * self.peak
                row.values["mfu"] = row.samples * self.flops / flops_at_peak


def step_flops(model: nn.Module, inputs: Tensor) -> float:
    """FLOPs of forward and backward of one sample: 3 times those of the forward's matrix products.

    All scores of attention count, including those that a causal kernel leaves out. A frozen matrix counts twice: its
    own gradient is not computed.

    Args:
        model: the full model, on the meta device.
        inputs: a batch, on the meta device.
    """
    # All of the model as one part, whatever its own are.
    (flops,) = part_costs(nn.Sequential(model), [("0",)], inputs)
    # (batch, seq) of tokens
    tokens = inputs[0].numel()
    frozen = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            elements = module.weight.numel()
            frozen += 2 * elements * tokens
    # Of one sample.
    forward = flops / len(inputs)
    # Backward takes two products for each of forward's: for the gradients of inputs and of weights.
    return 3 * forward - frozen


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Peak FLOP/s of one device: from the table, or on a CPU as measured now.

    Args:
        device: the device.
        dtype: data type of the matrix products.

    Returns:
        The peak, or None for an accelerator that is not in the table; and where the number comes from.
    """
    name = ""
    if device.type in ("cuda", "xpu"):
        name = getattr(torch, device.type).get_device_name(device)
    if dtype in PEAK_NAMES:
        peak_name = PEAK_NAMES[dtype]
        known = named_peak(name, peak_name)
        if known is not None:
            dtype_name = "bfloat16" if peak_name == "bf16" else str(dtype).removeprefix("torch.")
            return known, f"{name}: table, {dtype_name}, dense"
    if device.type != "cpu":
        return None, f"{name or device.type}: not in the table of `mmm.runtime.peaks`"
    # A CPU emulates narrower types.
    if dtype not in (torch.float32, torch.float64):
        dtype = torch.float32
    dtype_name = str(dtype).removeprefix("torch.")
    return measured_flops(dtype), f"cpu: measured, a product of {SIZE}² {dtype_name}"


def measured_flops(dtype: torch.dtype, tries: int = 3) -> float:
    """FLOP/s of a product of square matrices on the CPU, with the threads of this rank: the best of some tries."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    flops = 2 * SIZE**3
    best = 0.0
    # The first product is warm-up.
    for attempt in range(tries + 1):
        begin = time.perf_counter()
        a @ a
        seconds = time.perf_counter() - begin
        if attempt > 0:
            best = max(best, flops / seconds)
    return best
