"""``launch mmm doctor --network``: what is said of times that were measured, and the command itself."""

import json
import sys

import pytest

from mmm.cli.doctor.collectives import SIZES, Level, judged
from mmm.cli.main import main as mmm
from mmm.machines.find import named
from support.launcher import Launcher

MIB16 = SIZES[-1]


def level(*rates, together=False, ranks=4):
    """Groups whose all-reduce of the largest size goes at so many bytes/s of the bus, and the others at a tenth."""
    factor = 2 * (ranks - 1) / ranks
    seconds = [[5e-5, *(factor * size / (rate if size == MIB16 else rate / 10) for size in SIZES)] for rate in rates]
    return Level("a level", ranks, [f"node{i}" for i in range(len(rates))], seconds, together)


@pytest.fixture
def perlmutter():
    return named({}, "perlmutter").changed({"hosts": 3})


def test_links_that_are_as_fast_as_the_machines(perlmutter):
    found = judged(level(200e9, 210e9, 205e9), SIZES, perlmutter, "nccl")
    assert (found.status, found.fix) == ("ok", "")
    assert found.seen == (
        "nccl, all-reduce of 4 ranks in 3 hosts at once: 8 B in 50 µs; GB/s of the bus: 64 KiB 20, 1 MiB 20, "
        "16 MiB 200; Perlmutter: 240 (link_bandwidth × 0.8)"
    )


def test_a_host_that_is_slow_is_named(perlmutter):
    found = judged(level(200e9, 130e9, 205e9), SIZES, perlmutter, "nccl")
    assert (found.status, found.fix) == ("warn", "slow on node1: leave it out, or report it")


def test_a_network_that_is_not_the_fast_one(perlmutter):
    """What the local ranks of a host send together counts, against all its adapters."""
    found = judged(level(*[15e9] * 4, together=True, ranks=3), SIZES, perlmutter, "nccl")
    assert found.status == "ok"
    assert "of a host: 64 KiB 6, 1 MiB 6, 16 MiB 60; Perlmutter: 80 (network_bandwidth × 0.8)" in found.seen
    found = judged(level(*[2e9] * 4, together=True, ranks=3), SIZES, perlmutter, "nccl")
    assert found.status == "warn"
    assert "aws-ofi-nccl plugin" in found.fix


def test_a_machine_that_is_not_known():
    found = judged(level(1e9), SIZES, None, "gloo")
    assert (found.status, found.fix) == (
        "ok",
        "no figure to compare with: --site NAME, or mmm machine --measure",
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--network", "--network"),
        ("--site aurora", "--site"),
        ("--network --timeout 0", "--timeout 0"),
    ],
)
def test_what_is_refused(flags, words, capsys):
    assert mmm(["doctor", *flags.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.long
def test_ranks_of_this_host(tmp_path):
    launcher = Launcher(tmp_path)
    words = ["-n", "2", "--device", "cpu", sys.executable, "-m", "mmm.cli.main", "doctor", "--network"]
    done = launcher.run(*words, "--json", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["name"], found["status"]) == ("inside a host", "ok")
    assert found["seen"].startswith("gloo, all-reduce of 2 ranks: 8 B in ")
