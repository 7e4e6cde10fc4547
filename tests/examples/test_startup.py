"""The example that measures start-up: its numbers are those of real starts, and its arithmetic is right."""

import json
import sys

import pytest

import mmm.history
from mmm.errors import ConfigError, LaunchError
from mmm.examples import _startup_cost as measure
from mmm.examples._startup_cost import Start, one_import, start
from mmm.examples.startup import PROGRAM, Config, growth, table, train

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


@pytest.mark.parametrize("options", [{"ranks": ()}, {"ranks": (0,)}, {"ways": ()}, {"repeats": 0}])
def test_refused(options):
    with pytest.raises(ConfigError, match="at least one of each, from 1"):
        train(Config(**options))


def test_no_way_is_left_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no no-such-mpiexec here that answers; give --mpiexec"):
        train(Config(ways=("mpiexec",), mpiexec="no-such-mpiexec"))
    assert not list(tmp_path.iterdir())


def test_refused_as_a_rank(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="starts ranks itself"):
        train(Config())


@pytest.mark.long
def test_a_run(tmp_path, monkeypatch, capsys):
    """One real start; the others' costs are made up."""
    real = start("forked", 2, PROGRAM, "mpiexec", str(tmp_path))
    assert real.seconds > 0
    assert real.cpu > 0.5
    monkeypatch.setattr(measure, "start", lambda way, ranks, *_: BY_RANKS[ranks][way])
    monkeypatch.setattr(measure, "one_import", lambda *_: 4.0)
    ways = ("forked", "torchrun", "mpiexec")
    config = Config(ranks=(1, 8), ways=ways, mpiexec="no-such-mpiexec", outdir=tmp_path / "o")
    by_ranks, imported = train(config)
    assert (by_ranks, imported) == (BY_RANKS, 4.0)
    data = mmm.history.load(tmp_path / "o")
    assert data.ranks.values.tolist() == [1, 8]
    assert data.torchrun_cpu.values.tolist() == [6.0, 34.0]
    assert (tmp_path / "o/plots/mplot/pngs/startup.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / "o/config.json").read_text())
    assert kept["cpu_of_a_further_rank"]["forked"] == pytest.approx(0.1)
    assert kept["startup"]["marks"]["first_step"] == [None]  # nothing is trained here
    assert kept["notes"] == ["mpiexec is left out: no no-such-mpiexec here that answers"]
    assert "a forked   b torchrun" in capsys.readouterr().out


@pytest.mark.long
def test_a_further_forked_rank_costs_a_tenth_of_an_import_at_most(tmp_path):
    folder = str(tmp_path)
    few, many = (min(start("forked", ranks, PROGRAM, "", folder).cpu for _ in range(2)) for ranks in (1, 8))
    assert (many - few) / 7 < 0.1 * one_import(PROGRAM, 2, folder)


@pytest.mark.long
@pytest.mark.parametrize("way", ["spawned", "torchrun", "mpiexec"])
def test_other_ways(tmp_path, way):
    if way == "mpiexec" and measure.mpi_flavour() is None:
        pytest.skip("no mpiexec here")
    forked = start("forked", 2, PROGRAM, "", str(tmp_path)).cpu
    assert start(way, 2, PROGRAM, "mpiexec", str(tmp_path)).cpu > 1.2 * forked
