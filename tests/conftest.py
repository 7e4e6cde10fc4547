"""Shared fixtures. Ranks are real processes, from a pool that is forked once, before this process computes anything."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

RANKS = 4


def pytest_collection_finish(session):
    """Fork the ranks as soon as it is known that a test needs them: later, OpenMP threads may be running here."""
    if any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
        from support.pool import RankPool

        session.config.rank_pool = RankPool(RANKS)


def pytest_unconfigure(config):
    if pool := getattr(config, "rank_pool", None):
        pool.close()


@pytest.fixture
def pool(request):
    """``pool.run(function, world_size, *args)``: the results of `function(rank, *args)`, by rank."""
    return request.config.rank_pool
