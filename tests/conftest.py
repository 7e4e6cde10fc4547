"""Ranks are real processes, from a pool that is forked once, before this process computes anything."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["mmm.testing.plugin"]


@pytest.fixture
def pool(run_on_ranks):
    return SimpleNamespace(run=run_on_ranks)
