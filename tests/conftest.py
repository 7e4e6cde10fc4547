"""Ranks are real processes, from a pool that is forked once, before this process computes anything."""

import compileall
import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

pytest_plugins = ["mmm_verify.testing.plugin"]

# Files of which some test takes minutes, the longest first: a worker that began one at the end would be alone with it.
LONGEST = (
    "mmm_lab/parity/test_matrix.py",
    "mmm/trainer/test_resume.py",
    "mmm/trainer/test_resume_launched.py",
    "benchmarks/test_all_start.py",
    "mmm/trainer/test_elastic.py",
    "test_three_lines.py",
    "mmm_lab/planner/test_dry_run.py",
    "fuzz/test_finds.py",
    "mmm_verify/testing/test_plugin.py",
    "mmm_launch/test_elastic.py",
    "fuzz_files/test_finds.py",
    "mmm/parallel/test_scale.py",
)


def pytest_configure(config):
    """The package's bytecode, for the hundreds of processes that tests start: where PYTHONDONTWRITEBYTECODE is set, as
    in many images, each would compile all that it imports."""
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        compileall.compile_dir(TESTS.parent / "src", quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without the collector, which looks again and again at modules that stay; with bytecode of the tests."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish():
    # In the pool as well, which is forked now.
    gc.enable()
    result = yield
    # After that: the pool asks the collector for caches.
    gc.freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The order in which workers take files: the longest, then those of many tests."""
    tests = Counter(item.path for item in items)
    longest = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (longest.get(item.path, len(longest)), -tests[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test whose run was refused because this PyTorch cannot do it is skipped, with the row of the table."""
    report = yield
    if report.failed:
        from mmm.torch_private.faults import FAULTS

        output = f"{call.excinfo.value}{report.longreprtext}{report.capstderr}{report.capstdout}"
        for fault in FAULTS:
            if str(fault) in output and not fault.works():
                report.outcome = "skipped"
                report.longrepr = (str(item.path), 0, f"Skipped: this PyTorch cannot do {fault}")
    return report


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Threads of small operators wait for each other where cores are shared: a training here takes a sixth without. And
    what a CPU can do at most is measured by a small product."""
    if "torch" in sys.modules:
        import torch

        from mmm.run.hooks import utilization

        torch.set_num_threads(1)
        utilization.SIZE = 64


@pytest.fixture
def launcher(tmp_path):
    """`launch` in a folder of its own. What of it is left is ended."""
    from support.launcher import Launcher

    made = Launcher(tmp_path)
    yield made
    for pid in made.alive():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def no_process_group(monkeypatch):
    """The test fails where it makes a process group, or a store by which ranks would meet."""
    import torch.distributed

    for name in ("init_process_group", "rendezvous", "TCPStore", "HashStore"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: pytest.fail("a process group was made"))
