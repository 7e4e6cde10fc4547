"""Ranks are real processes, from a pool that is forked once, before this process computes anything."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["mmm.testing.plugin"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Threads of small operators wait for each other where cores are shared: a training here takes a sixth without. And
    what a CPU can do at most is measured by a small product."""
    if "torch" in sys.modules:
        import torch

        from mmm.plan import utilization

        torch.set_num_threads(1)
        utilization.SIZE = 64
