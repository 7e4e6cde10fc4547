"""Ranks are real processes, from a pool that is forked once, before this process computes anything."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["mmm.testing.plugin"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Threads of small operators wait for each other where cores are shared: a training here takes a sixth without."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
