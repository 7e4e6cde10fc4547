"""float64 only where the device has it."""

from types import SimpleNamespace

import pytest
import torch

from mmm.models.draw import accum_dtype


@pytest.mark.parametrize(
    ("kind", "has_fp64", "expected"),
    [
        ("cpu", None, torch.float64),
        ("cuda", None, torch.float64),
        ("mps", None, torch.float32),
        ("xpu", True, torch.float64),
        ("xpu", False, torch.float32),
    ],
)
def test_the_widest_float(monkeypatch, kind, has_fp64, expected):
    """Intel's Arc has no float64, its data-center GPUs have."""
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))
    assert accum_dtype(torch.device(kind)) == expected
