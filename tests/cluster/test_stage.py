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
from mmm.launch.host.agent_supervisor import HELPERS

# One write a line: lines of several ranks do not mix.
WHERE = """import os, socket, sys, mmm
sys.stdout.write(' '.join([socket.gethostname(), os.environ['RANK'], sys.prefix, mmm.__file__]) + '\\n')"""


@pytest.fixture(params=["mpich", "openmpi"])
def staged(request, launcher, two_hosts):
    """Runs launch with --stage of an environment that only mmmA can read, to a disk that has so many MB on mmmB."""
    env, disk = launcher.folder / "env", launcher.folder / "disk"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    packages = next(env.glob("lib/python*/site-packages"))
    shutil.copytree(Path(mmm.__file__).parent, packages / "mmm", ignore=shutil.ignore_patterns("__pycache__"))
    disk.mkdir()
    launcher.prefix = two_hosts.start_words()
    words = [*two_hosts.options(request.param), "--device", "cpu", "--stage", str(env), "--stage-to", str(disk)]

    def make(megabytes):
        other = two_hosts.separate(disk, megabytes, env)
        return words, {"mmmA": disk, "mmmB": other}

    return make


def left(disks):
    return {host: [p.name for p in disk.glob("mmm-stage-*/*")] for host, disk in disks.items()}


@pytest.mark.parametrize("by", ["rank", "host"])
def test_the_second_host_has_it_from_the_first(launcher, two_hosts, staged, by):
    words, disks = staged(100)
    run = [*words, "--ranks-by", by, "python3", "-c", WHERE]
    kept = launcher.run(*run[:-3], "--stage-keep", *run[-3:], timeout=120, **two_hosts.variables)
    assert kept.returncode == 0, kept.stderr
    lines = sorted(line.split() for line in kept.stdout.splitlines())
    assert [line[:2] for line in lines] == [["mmmA", "0"], ["mmmA", "1"], ["mmmB", "2"], ["mmmB", "3"]]
    assert all(prefix.startswith(f"{disks['mmmA']}/mmm-stage-") for _, _, prefix, _ in lines)
    assert all(package.startswith(prefix) for _, _, prefix, package in lines)
    copies = left(disks)
    assert copies["mmmA"] == copies["mmmB"] != []
    inode = next(disks["mmmB"].glob("mmm-stage-*/*")).stat().st_ino
    again = launcher.run(*run[:-3], "--stage-keep", *run[-3:], timeout=120, **two_hosts.variables)
    assert again.returncode == 0, again.stderr
    assert next(disks["mmmB"].glob("mmm-stage-*/*")).stat().st_ino == inode
    last = launcher.run(*run, timeout=120, **two_hosts.variables)
    assert last.returncode == 0, last.stderr
    assert left(disks) == {"mmmA": [], "mmmB": []}
    assert launcher.gone(within=2)


@pytest.mark.parametrize("early", [True, False])
def test_a_disk_is_full(launcher, two_hosts, staged, early):
    """Found before anything is copied; or on the way, where an archive does not say how much is in it."""
    words, disks = staged(20)
    env = launcher.folder / "env"
    if early:
        with (env / "large").open("wb") as file:
            file.truncate(30_000_000)
    else:
        with (env / "large").open("wb") as file:
            file.write(bytes(30_000_000))
        subprocess.run(["tar", "czf", launcher.folder / "env.tgz", "-C", env, "."], check=True)
        words = [word if word != str(env) else str(launcher.folder / "env.tgz") for word in words]
    done = launcher.run(*words, "python3", "-c", WHERE, timeout=120, **two_hosts.variables)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("launch: ")]
    assert len(said) == 1, done.stderr
    assert ": mmmB: " in said[0]
    assert (" MB are needed in " if early else "No space left on device") in said[0]
    assert left(disks) == {"mmmA": [], "mmmB": []}
    assert done.stdout == ""


def helpers(folder):
    """Processes by which an MPI holds a host's ranks, started in `folder`. They are started without the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "comm").read_text().strip() in HELPERS and os.readlink(path / "cwd") == str(folder):
                found.append(int(path.name))
    return found


def test_a_host_is_cut_off_while_it_copies(launcher, two_hosts, staged):
    words, disks = staged(1000)
    with (launcher.folder / "env" / "large").open("wb") as file:
        file.truncate(500_000_000)
    limit = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"]
    subprocess.run(["tc", "-n", "mmmA", "qdisc", "add", "dev", "vmmmA", "root", *limit], check=True)
    process = launcher.start(*words, "python3", "-c", WHERE, **two_hosts.variables)
    deadline = time.monotonic() + 60
    while not list(disks["mmmB"].glob("mmm-stage-*/.env-*/bin")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    two_hosts.cut()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("launch: ")]
    assert "mmmB" in said[0] or "10.77.0.2" in said[0], err
    assert launcher.gone(within=20)
    while helpers(launcher.folder):
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert left(disks) == {"mmmA": [], "mmmB": []}
    assert os.listdir(launcher.folder / "env" / "bin")
