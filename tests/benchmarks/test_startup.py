"""The benchmark that measures start-up: its numbers are those of real starts, and its arithmetic is right."""

import importlib
import sys
from pathlib import Path

import pytest

from mmm.errors import ConfigError
from mmm_launch.errors import LaunchError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
measure = importlib.import_module("startup_cost")
startup = importlib.import_module("startup")
Start, one_import, start = measure.Start, measure.one_import, measure.start
PROGRAM, growth, table = startup.PROGRAM, startup.growth, startup.table

BY_RANKS = {
    1: {"forked": Start(3.0, 4.0), "torchrun": Start(5.0, 6.0)},
    8: {"forked": Start(3.5, 4.7), "torchrun": Start(20.0, 34.0)},
}


def test_growth_and_table():
    assert growth(BY_RANKS, "forked") == pytest.approx(0.1)
    assert growth(BY_RANKS, "torchrun") == pytest.approx(4.0)
    lines = table(BY_RANKS, ["forked", "torchrun"], 4.0).splitlines()
    assert lines[2].split() == ["1", "3.00", "4.00", "5.00", "6.00"]
    assert lines[-2].split() == ["forked", "0.10", "CPU-s,", "2.5%"]
    assert lines[-1].split() == ["torchrun", "4.00", "CPU-s,", "100.0%"]


def test_cpu_time_is_that_of_the_whole_tree(tmp_path):
    spin = "import os, time\npid = os.fork()\nwhile time.process_time() < 0.4: pass\n"
    (tmp_path / "t.py").write_text(f"{spin}os.waitpid(pid, 0) if pid else None\nprint('x')")
    cost = measure.run([sys.executable, "t.py"], str(tmp_path), {"MMM_STARTED_AT": "1"})
    assert cost.cpu >= 0.8
    assert cost.output == "x\nx\n"
    with pytest.raises(LaunchError, match=r"failed \(3\):\nwhy"):
        measure.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], str(tmp_path))


@pytest.mark.parametrize(
    ("says", "flavour"),
    [("HYDRA build details:", "MPICH"), ("mpiexec (OpenRTE) 4.1.4", "Open MPI"), ("Other 1.0", "Other 1.0")],
)
def test_mpiexec(tmp_path, says, flavour):
    made = tmp_path / "mpiexec"
    made.write_text(f"#!/bin/sh\necho '{says}'\n")
    made.chmod(0o755)
    assert measure.mpi_flavour(str(made)) == flavour
    line = measure.command("mpiexec", 4, ["-m", "x"], str(made))
    assert line[-5:] == ["-n", "4", sys.executable, "-m", "x"]
    assert ("--oversubscribe" in line) == (flavour == "Open MPI")
    assert measure.mpi_flavour(str(tmp_path / "none")) is None


@pytest.mark.parametrize("flags", [["--ranks", "0"], ["--repeats", "0"]])
def test_refused(flags):
    with pytest.raises(ConfigError, match="each from 1"):
        startup.main(["--curve", *flags])


def test_no_way_is_left():
    with pytest.raises(ConfigError, match="--mpiexec"):
        startup.main(["--curve", "--ways", "mpiexec", "--mpiexec", "no-such-mpiexec"])


@pytest.mark.long
def test_a_start(tmp_path):
    real = start("forked", 2, PROGRAM, "mpiexec", str(tmp_path))
    assert real.seconds > 0
    assert real.cpu > 0.5


@pytest.mark.long
def test_a_further_forked_rank_costs_a_tenth_of_an_import_at_most(tmp_path):
    folder = str(tmp_path)
    few, many = (min(start("forked", ranks, PROGRAM, "", folder).cpu for _ in range(2)) for ranks in (1, 8))
    assert (many - few) / 7 < 0.1 * one_import(PROGRAM, 2, folder)
