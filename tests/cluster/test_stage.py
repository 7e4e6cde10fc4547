"""`launch --stage` on two hosts with networks and disks of their own, the second without the source."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mmm
import mmm_launch
from mmm_launch.host.agent import HELPERS

# One write a line: lines of several ranks do not mix.
WHERE = """import os, socket, sys, mmm
sys.stdout.write(' '.join([socket.gethostname(), os.environ['RANK'], sys.prefix, mmm.__file__]) + '\\n')"""


@pytest.fixture(params=["mpich", "openmpi"])
def staged(request, launcher, two_hosts):
    """Runs launch with --stage of an environment that only mmmA can read, to a disk that has so many MB on mmmB."""
    env = launcher.folder / "env"
    disk = launcher.folder / "disk"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    packages = next(env.glob("lib/python*/site-packages"))
    for package in (mmm, mmm_launch):
        source = Path(package.__file__).parent
        shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    disk.mkdir()
    launcher.prefix = two_hosts.start_words()
    argv = [*two_hosts.options(request.param), "--device", "cpu", "--stage", str(env), "--stage-to", str(disk)]

    def make(megabytes):
        other = two_hosts.separate(disk, megabytes, env)
        return argv, {"mmmA": disk, "mmmB": other}

    return make


def left(launcher, disks):
    """What copies and archives there are."""
    copies = {host: [path.name for path in disk.glob("mmm-stage-*/*")] for host, disk in disks.items()}
    return copies | {"archives": [path.name for path in launcher.folder.glob(".mmm-stage-*")]}


# What is left when all copies and archives are removed.
NOTHING = {"mmmA": [], "mmmB": [], "archives": []}


def test_each_host_unpacks_the_one_archive(launcher, two_hosts, staged):
    argv, disks = staged(100)
    done = launcher.run(*argv, "python3", "-c", WHERE, timeout=120, **two_hosts.variables)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:2] for line in lines] == [["mmmA", "0"], ["mmmA", "1"], ["mmmB", "2"], ["mmmB", "3"]]
    assert all(prefix.startswith(f"{disks['mmmA']}/mmm-stage-") for _, _, prefix, _ in lines)
    assert all(package.startswith(prefix) for _, _, prefix, package in lines)
    assert done.stderr.count("is packed") == 1
    assert left(launcher, disks) == NOTHING
    assert launcher.gone(within=2)


def test_a_disk_is_full(launcher, two_hosts, staged):
    argv, disks = staged(20)
    env = launcher.folder / "env"
    with (env / "large").open("wb") as file:
        file.write(bytes(30_000_000))
    done = launcher.run(*argv, "python3", "-c", WHERE, timeout=120, **two_hosts.variables)
    assert done.returncode == 2
    assert "(on mmmB)" in done.stderr
    assert "No space left on device" in done.stderr
    assert left(launcher, disks) == NOTHING
    assert done.stdout == ""


def helpers(folder):
    """Processes by which an MPI holds a host's ranks, started in `folder`. They are started without the mark."""
    results = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "comm").read_text().strip() in HELPERS and os.readlink(path / "cwd") == str(folder):
                results.append(int(path.name))
    return results


def test_a_host_is_cut_off_while_its_ranks_run(launcher, two_hosts, staged):
    """It removes its copy, as the other one does."""
    argv, disks = staged(100)
    code = "import os, time; open('began' + os.environ['RANK'], 'w'); time.sleep(600)"
    process = launcher.start(*argv, "python3", "-c", code, **two_hosts.variables)
    launcher.wait_for(*(f"began{rank}" for rank in range(4)))
    two_hosts.cut()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "lost rank" in err
    assert "mmmB" in err
    assert launcher.gone(within=20)
    while helpers(launcher.folder):
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert left(launcher, disks) == NOTHING
