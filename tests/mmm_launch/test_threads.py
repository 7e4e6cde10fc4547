"""Each rank computes with as many threads as it was promised, though torch is imported before it knows its CPUs."""

import os
from pathlib import Path

import pytest

import support
from support.clock import PATIENCE

LOOK = """
import os, torch
torch.ones(300, 300) @ torch.ones(300, 300)
open("threads-" + os.environ["RANK"], "w").write(f"{os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()} "
                                                 f"{len(os.sched_getaffinity(0))}")
"""
CPUS = sorted(os.sched_getaffinity(0))
BIND = ["--cpu-bind", f"list:{CPUS[0]}:{CPUS[-1]}"]


@pytest.fixture
def look(launcher):
    """OMP_NUM_THREADS, torch's threads and the CPUs of two ranks."""

    def run(*words, **variables):
        launcher.write("t.py", LOOK)
        done = launcher.run(*words, "-n", "2", "--device", "cpu", "python3", "t.py", timeout=PATIENCE, **variables)
        assert done.returncode == 0, done.stderr
        return [tuple(map(int, (launcher.folder / f"threads-{rank}").read_text().split())) for rank in (0, 1)]

    return run


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# The ranks' processes are forked, here or on a host; or each imports torch itself, under what it has been told.
@pytest.fixture(params=["here", long("host"), long("spawn")])
def options(request, launcher):
    if request.param == "host":
        return launcher.on_hosts()
    return ["--no-prefork"] if request.param == "spawn" else []


def test_not_bound(look, options):
    each = max(1, len(CPUS) // 2)
    assert look(*options) == [(each, each, len(CPUS))] * 2


def test_a_package_that_made_the_thread_pool_before_the_fork(launcher):
    launcher.write("site-packages/maker.py", "from support.thread_pool import make\nmake()\n")
    launcher.write("t.py", "import maker\nfrom support.thread_pool import ask_at_once\nask_at_once()\n")
    paths = launcher.folder / "site-packages", Path(support.__file__).parents[1]
    done = launcher.run("-n", "4", "python3", "t.py", timeout=PATIENCE, PYTHONPATH=os.pathsep.join(map(str, paths)))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ([], {}, (1, 1, 1)),
        long([], {"OMP_NUM_THREADS": "2"}, (2, 2, 1)),  # what the user says counts
        long(["--env", "OMP_NUM_THREADS=2"], {}, (2, 2, 1)),
    ],
)
def test_bound_to_one_cpu_each(look, options, words, variables, expected):
    assert look(*options, *BIND, *words, **variables) == [expected] * 2
