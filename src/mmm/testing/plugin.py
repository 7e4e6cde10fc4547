"""A pytest plugin, for a root conftest.py: ``pytest_plugins = ["mmm.testing.plugin"]`` (example: `mmm.testing`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mmm.processes.pool import RankPool

POOL = pytest.StashKey["RankPool"]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the pool as soon as it is known that a test needs it: later, OpenMP threads may be running here."""
    if any("run_on_ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        _pool(session.config)


def _pool(config: pytest.Config) -> RankPool:
    from mmm.processes.pool import RankPool

    if POOL not in config.stash:
        config.stash[POOL] = RankPool()
    return config.stash[POOL]


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()


@pytest.fixture
def run_on_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_on_ranks(function, n, *args, timeout=300)``: the results of ``function(rank, *args)`` on n ranks, by rank.

    `mmm.processes.pool.RankPool.run` says what else there is to it.
    """
    return _pool(request.config).run
