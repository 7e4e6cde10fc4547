"""The pytest plugin (`mmm_verify.testing` says what it does). It imports no torch until a test needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mmm_verify import Verdict
    from mmm_verify.ranks.pool import RankPool

POOL = pytest.StashKey["RankPool"]()
TIMEOUT = 10.0  # s that a marked test may take


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on ranks (mmm_verify.testing)")
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="that a test with @pytest.mark.ranks may take, if its mark says nothing (default: %(default)g)",
    )
    group.addoption(
        "--ranks-device",
        choices=("cpu", "cuda", "xpu", "auto"),
        default="cpu",
        help="where their ranks compute, one a device (default: cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(number or mesh, mesh=None, timeout=None): run the test on so many ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    from mmm_verify.testing.marked import run

    run(pyfuncitem, pyfuncitem.config.getoption("--ranks-device"), pyfuncitem.config.getoption("--ranks-timeout"))
    return True


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank that runs a test with the mark ``ranks``."""
    _marked(request)
    return 0  # each rank has its own in its place


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The `DeviceMesh` of a test with the mark ``ranks``: as the mark says, or one axis ``dp``."""
    _marked(request)
    return None  # each rank has its own in its place


def _marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("ranks") is None:
        raise pytest.UsageError(f"the fixture {request.fixturename} is for tests with @pytest.mark.ranks(…)")


@pytest.fixture(scope="session")
def verify() -> Callable[..., Verdict]:
    """`mmm_verify.verify`, which fails the test where the two are not the same. Returns the verdict."""

    def verify(*args: Any, **settings: Any) -> Verdict:
        from mmm_verify import verify as verify_program

        verdict = verify_program(*args, **settings)
        if not verdict:
            pytest.fail(f"{verdict}\n{verdict.details}".rstrip(), pytrace=False)
        return verdict

    return verify


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the pool as soon as it is known that a test needs it: later, OpenMP threads may be running here."""
    if any("run_on_ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        _pool(session.config)


def _pool(config: pytest.Config) -> RankPool:
    from mmm_verify.ranks.pool import RankPool

    if POOL not in config.stash:
        config.stash[POOL] = RankPool()
    return config.stash[POOL]


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()


@pytest.fixture
def run_on_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_on_ranks(function, n, *args, timeout=300)``: the results of ``function(rank, *args)`` on n ranks, by rank.

    `mmm_verify.ranks.pool.RankPool.run` says what else there is to it.
    """
    return _pool(request.config).run
