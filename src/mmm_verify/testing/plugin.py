"""The pytest plugin; `mmm_verify.testing` describes it. It does not import torch until a test needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mmm_verify import Verdict
    from mmm_verify.ranks.pool import RankPool

# Where the session's pool of ranks is kept.
POOL = pytest.StashKey["RankPool"]()
# Seconds that a marked test may take.
TIMEOUT = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on ranks (mmm_verify.testing)")
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="time limit of a test with @pytest.mark.ranks, unless its mark has one (default: %(default)g)",
    )
    group.addoption(
        "--ranks-device",
        choices=("cpu", "cuda", "xpu"),
        default="cpu",
        help="where the ranks of such tests compute, one on each device (default: cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(number or mesh, timeout=None): run the test on so many ranks")


# First, because pytest's own implementation would call the test in this process.
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
    _check_marked(request)
    # Replaced on each rank by its own.
    return 0


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The `DeviceMesh` of a test with the mark ``ranks``: the mesh in the mark, or one axis ``dp``."""
    _check_marked(request)
    # Replaced on each rank by its own.
    return None


def _check_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("ranks") is None:
        raise pytest.UsageError(f"the fixture {request.fixturename} is for tests with @pytest.mark.ranks(…)")


@pytest.fixture(scope="session")
def verify() -> Callable[..., Verdict]:
    """`mmm_verify.verify`, which fails the test if the two are not the same. Returns the verdict."""
    import mmm_verify

    return _failing_the_test(mmm_verify.verify)


@pytest.fixture(scope="session")
def verify_program() -> Callable[..., Verdict]:
    """`mmm_verify.verify_program`, which fails the test if the script is not the same on several ranks as on one."""
    import mmm_verify

    return _failing_the_test(mmm_verify.verify_program)


def _failing_the_test(function: Callable[..., Verdict]) -> Callable[..., Verdict]:
    @wraps(function)
    def checked(*args: Any, **settings: Any) -> Verdict:
        verdict = function(*args, **settings)
        if not verdict:
            pytest.fail(f"{verdict}\n{verdict.details}".rstrip(), pytrace=False)
        return verdict

    return checked


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the pool as soon as it is known that a test needs it: later, OpenMP threads may be running here."""
    if any("run_on_ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        _pool(session.config)


def _pool(config: pytest.Config) -> RankPool:
    """The session's pool of ranks, made at the first call."""
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

    See `mmm_verify.ranks.pool.RankPool.run` for its other arguments.
    """
    return _pool(request.config).run
