"""Hosts with different numbers of slots, on real launcher backends: a rank a slot, and each knows its place."""

import sys

import pytest

from mmm_launch.spec.hosts import free_port
from support.clock import PATIENCE

LAUNCH = [sys.executable, "-m", "mmm_launch", "--device", "cpu"]
PROGRAM = """
import os, socket
import torch, torch.distributed as dist
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import whoami
me = whoami()
with process_group(me, torch.device("cpu"), 60.0):
    total = torch.ones(1)
    dist.all_reduce(total)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    place = f"{me.rank}/{me.world_size} {me.local_rank}/{me.local_world_size} {host} {total.item():g}\\n"
    print(place, end="", flush=True)
"""


def places(text, *hosts):
    """What the program prints where the hosts have these ranks: name and number."""
    total, expected = sum(number for _, number in hosts), []
    for name, number in hosts:
        expected += [f"{len(expected) + i}/{total} {i}/{number} {name} {total}" for i in range(number)]
    return sorted(line for line in text.splitlines() if line.endswith(f" {total}")) == sorted(expected)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
def test_a_list_of_hosts(launcher, two_hosts, mpi, sizes):
    launcher.write("t.py", PROGRAM)
    launcher.prefix = two_hosts.start_words()
    _, _, _, _, *how = two_hosts.options(mpi)
    hosts = [*zip(two_hosts.NAMES, sizes, strict=True)]
    named = ",".join(f"{name}:{number}" for name, number in hosts)
    words = ["--hosts", named, *how, "--device", "cpu", "python3", "t.py"]
    done = launcher.run(*words, timeout=PATIENCE, **two_hosts.variables)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout, *hosts), done.stdout


@pytest.mark.parametrize(("asked", "sizes"), [(["-n6"], (4, 2)), (["-N2", "-n5", "--exclusive"], (3, 2))])
def test_salloc(launcher, slurm, asked, sizes):
    launcher.write("t.py", PROGRAM)
    words = ["salloc", "--quiet", *asked, *LAUNCH, "python3", "t.py"]
    variables = launcher.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    done = slurm.run(*words, variables=variables, cwd=launcher.folder)
    slurm.idle()
    assert done.returncode == 0, done.stderr
    assert places(done.stdout, *zip(("n1", "n2"), sizes, strict=True)), done.stdout + done.stderr


@pytest.mark.parametrize("asked", [["-N2", "-n3", "--ntasks-per-node=2"], ["-N1", "-n1", "--ntasks-per-node=2"]])
def test_sbatch_has_as_many_as_srun_starts(launcher, slurm, asked):
    """Its variables name three numbers, of which srun takes SLURM_NTASKS."""
    launcher.write("t.py", PROGRAM)
    lines = ["#!/bin/sh", "srun sh -c 'echo srun'", " ".join([*LAUNCH, "python3", "t.py"]), ": > over"]
    script = launcher.write("batch.sh", "\n".join(lines) + "\n")
    variables = launcher.environment(MASTER_ADDR="127.0.0.1")
    slurm.run("sbatch", "-o", "batch.out", *asked, str(script), variables=variables, cwd=launcher.folder)
    launcher.wait_for("over", timeout=PATIENCE)
    slurm.idle()
    text = (launcher.folder / "batch.out").read_text()
    number = text.splitlines().count("srun")
    assert number == int(asked[1].removeprefix("-n"))
    assert places(text, *{1: [("n1", 1)], 3: [("n1", 2), ("n2", 1)]}[number]), text
