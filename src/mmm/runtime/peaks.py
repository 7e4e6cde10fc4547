"""The peak FLOP/s of devices by name, from the makers' data sheets."""

# Part of a device's name (the first match counts) → dtype → FLOP/s of dense matrix products, without sparsity. The
# values are for what PyTorch calls a device: one GCD of an MI250X, one tile of a GPU Max.
PEAKS: dict[str, dict[str, float]] = {
    "H100 PCIe": {"bf16": 756e12, "fp32": 51e12, "fp64": 51e12},
    "H100 NVL": {"bf16": 835e12, "fp32": 60e12, "fp64": 60e12},
    "H100": {"bf16": 989e12, "fp32": 67e12, "fp64": 67e12},
    "H200": {"bf16": 989e12, "fp32": 67e12, "fp64": 67e12},
    "GH200": {"bf16": 989e12, "fp32": 67e12, "fp64": 67e12},
    "A100": {"bf16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12},
    "MI250": {"bf16": 191.5e12, "fp32": 47.9e12, "fp64": 47.9e12},
    "MI300X": {"bf16": 1307e12, "fp32": 163.4e12, "fp64": 163.4e12},
    "GPU Max 1550": {"bf16": 419e12, "fp32": 26e12, "fp64": 26e12},
}
# dtype → the dtype of the table that has the same peak.
AS_FAST = {"fp16": "bf16"}


def named_peak(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device; None if the table does not have it.

    Args:
        device_name: name of the device, as PyTorch tells it.
        dtype: name of a precision: bf16, fp16, fp32 or fp64.
    """
    for name, rates in PEAKS.items():
        if name in device_name:
            return rates.get(AS_FAST.get(dtype, dtype))
    return None
