"""The benchmark that measures start-up: its numbers are those of real starts, and its arithmetic is right."""

import importlib
import sys
from pathlib import Path

import pytest

from mmm_launch.errors import LaunchError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
measure = importlib.import_module("startup_cost")
startup = importlib.import_module("startup")
Start = measure.Start
one_import = measure.one_import
start = measure.start
PROGRAM = startup.PROGRAM
growth = startup.growth
table = startup.table


def test_cpu_time_is_that_of_the_whole_tree(tmp_path):
    spin = "import os, time\npid = os.fork()\nwhile time.process_time() < 0.4: pass\n"
    (tmp_path / "t.py").write_text(f"{spin}os.waitpid(pid, 0) if pid else None\nprint('x')")
    cost = measure.run([sys.executable, "t.py"], str(tmp_path), {"MMM_STARTED_AT": "1"})
    assert cost.cpu >= 0.8
    assert cost.output == "x\nx\n"
    with pytest.raises(LaunchError, match=r"failed \(3\):\nwhy"):
        measure.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], str(tmp_path))


@pytest.mark.long
def test_a_start(tmp_path):
    real = start("forked", 2, PROGRAM, "mpiexec", str(tmp_path))
    assert real.seconds > 0
    assert real.cpu > 0.5


@pytest.mark.long
def test_a_further_forked_rank_costs_a_tenth_of_an_import_at_most(tmp_path):
    folder = str(tmp_path)
    # The less disturbed of two starts.
    few, many = (min(start("forked", ranks, PROGRAM, "", folder).cpu for _ in range(2)) for ranks in (1, 8))
    assert (many - few) / 7 < 0.1 * one_import(PROGRAM, 2, folder)
