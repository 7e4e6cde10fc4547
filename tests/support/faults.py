"""What a PyTorch cannot do: tests that meet it are skipped by name."""

import pytest

from mmm.torch_private.faults import met


def skipped_by(*choices):
    """A mark for a test that does `choices`: it is skipped where a row of the table says that this PyTorch cannot."""
    reasons = [f"this PyTorch cannot do {fault}" for fault in met(choices)]
    return pytest.mark.skipif(bool(reasons), reason=" ".join(reasons) or "it can")
