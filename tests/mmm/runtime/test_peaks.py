"""Peaks of accelerators by the names that their drivers have."""

import pytest

from mmm.runtime.peaks import PEAKS, named_peak


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("Intel(R) Data Center GPU Max 1550", "fp64", 26e12),
        ("AMD Radeon", "bf16", None),
        ("NVIDIA A100-SXM4-40GB", "fp8", None),
    ],
)
def test_peaks_by_name(name, dtype, peak):
    assert named_peak(name, dtype) == peak


def test_each_accelerator_has_all_rates():
    assert all(set(rates) == {"bf16", "fp32", "fp64"} for rates in PEAKS.values())
