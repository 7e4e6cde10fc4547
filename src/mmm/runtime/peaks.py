"""FLOP/s that devices reach at most, by name: pure data, of the makers' data sheets."""

# Dense matrix products, without sparsity, by what a device's name contains (the first match counts). One GCD of an
# MI250X, one tile of a GPU Max, which is what PyTorch calls a device there.
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
AS_FAST = {"fp16": "bf16"}


def named_peak(device_name: str, dtype: str) -> float | None:
    """FLOP/s of a device whose name is known; None where the table has none.

    Args:
        dtype: name of a precision: bf16, fp16, fp32 or fp64.
    """
    for known, rates in PEAKS.items():
        if known in device_name:
            return rates.get(AS_FAST.get(dtype, dtype))
    return None
