"""Model FLOPs utilisation: what a step's matrix products need, over what the devices could compute in its time.

Source: Chowdhery et al., "PaLM", 2022, appendix B: a model's own FLOPs, so that recomputing activations does not count.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from mmm.parallel.plan import Plan
from mmm.parallel.pp.stages import part_costs, parts_of

# FLOP/s of dense matrix products, by what a device's name contains (the first match counts): the makers' data sheets,
# without sparsity. One GCD of an MI250X, one tile of a GPU Max, which is what PyTorch calls a device there.
_BF16, _FP32, _FP64 = torch.bfloat16, torch.float32, torch.float64
PEAKS: dict[str, dict[torch.dtype, float]] = {
    "H100 PCIe": {_BF16: 756e12, _FP32: 51e12, _FP64: 51e12},
    "H100 NVL": {_BF16: 835e12, _FP32: 60e12, _FP64: 60e12},
    "H100": {_BF16: 989e12, _FP32: 67e12, _FP64: 67e12},
    "H200": {_BF16: 989e12, _FP32: 67e12, _FP64: 67e12},
    "GH200": {_BF16: 989e12, _FP32: 67e12, _FP64: 67e12},
    "A100": {_BF16: 312e12, _FP32: 19.5e12, _FP64: 19.5e12},
    "MI250": {_BF16: 191.5e12, _FP32: 47.9e12, _FP64: 47.9e12},
    "MI300X": {_BF16: 1307e12, _FP32: 163.4e12, _FP64: 163.4e12},
    "GPU Max 1550": {_BF16: 419e12, _FP32: 26e12, _FP64: 26e12},
}
SIZE = 1024  # of the square matrices that are measured


def step_flops(model: nn.Module, plan: Plan, inputs: Tensor) -> float:
    """FLOPs of forward and backward of one sample: 3 times those of the forward's matrix products. Of attention all
    scores count, also those that a causal kernel leaves out.

    Args:
        model: full, on the meta device. inputs: a batch, on the meta device.
    """
    return 3 * sum(part_costs(model, parts_of(model, plan), inputs)) / len(inputs)


def named_peak(name: str, dtype: str) -> float | None:
    """FLOP/s of a device whose name is known; None where the table has none.

    Args:
        dtype: name of a precision: bf16, fp16 (as fast), fp32 or fp64.
    """
    kind = {"bf16": _BF16, "fp16": _BF16, "fp32": _FP32, "fp64": _FP64}[dtype]
    return next((rates[kind] for known, rates in PEAKS.items() if known in name and kind in rates), None)


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
        return None, f"{name or device.type}: not in the table of `mmm.plan.utilization`"
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
