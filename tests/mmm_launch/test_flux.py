"""launch inside a Flux job, with a stand-in for `flux`."""

import json
import os
import shlex
import socket
import subprocess
import sys

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.program.target import Target
from mmm_launch.spec import plan as planning
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.options import LaunchOptions
from mmm_launch.spec.scheduler import detect
from support.flux import job


def plan(environ, **options):
    return planning.plan(
        Target("module", "m"), LaunchOptions(**options), environ=environ, local=Accelerators(None, 0, "none")
    )


def test_the_hosts_and_gpus_are_those_that_the_broker_says(tmp_path):
    flux = job(tmp_path / "flux", "tuolumne[1001-1002]", ["8"])
    scheduler = detect(flux.environ)
    assert (scheduler.scheduler, scheduler.hosts, scheduler.gpus_per_host) == (
        "flux",
        ("tuolumne1001", "tuolumne1002"),
        4,
    )
    made = plan(flux.environ)
    expected = "flux run -N 2 -n 2 --exclusive -o cpu-affinity=off -o gpu-affinity=off"
    assert shlex.join(made.command).startswith(f"{expected} {sys.executable} -m mmm_launch.host.agent -m m")
    assert (made.ranks, made.launcher.value) == (8, "flux")


def test_a_part_of_the_hosts(tmp_path):
    flux = job(tmp_path / "flux", "n[1-3]", ["0", "12", "0"])
    made = plan(flux.environ, hosts="n3,n1", ppn=2)
    assert "-N 2 -n 2 --exclusive --requires=hosts:n3,n1 -o" in shlex.join(made.command)
    assert detect(flux.environ).gpus_per_host == 4
    with pytest.raises(LaunchError, match="not among the hosts of flux job"):
        plan(flux.environ, hosts="n9")


def test_gpus_that_do_not_divide_are_not_known(tmp_path):
    assert detect(job(tmp_path / "flux", "n[1-2]", ["3"]).environ).gpus_per_host is None


def test_the_order_of_schedulers(tmp_path):
    """A broker may run inside of another scheduler's job."""
    environ = job(tmp_path / "flux", "n1").environ | {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"}
    scheduler = detect(environ)
    assert scheduler.scheduler == "flux"
    assert "Slurm job 77" in scheduler.notes[0]
    assert detect(environ, "slurm").hosts == ("n1", "n2")
    assert detect(environ, "none").hosts == ()
    with pytest.raises(LaunchError, match="--scheduler flux"):
        detect({}, "flux")


@pytest.mark.parametrize(
    ("hostlist", "gpus", "says"),
    [
        (None, ["0"], "does not answer"),
        ("n[1-", ["0"], "host list"),
        ("n1", ["many"], "not numbers"),
        ("", ["0"], "it prints nothing"),
    ],
)
def test_a_broker_that_does_not_answer(tmp_path, hostlist, gpus, says):
    flux = job(tmp_path / "flux", hostlist, gpus)
    with pytest.raises(LaunchError, match=says) as error:
        detect(flux.environ)
    if hostlist is None:
        assert "--scheduler none" in str(error.value)


def test_no_flux_on_path(tmp_path):
    with pytest.raises(LaunchError, match="flux is not on PATH"):
        detect({"FLUX_URI": "local:///tmp/x", "PATH": str(tmp_path)})


def test_ranks_of_a_flux_job(tmp_path):
    """The agent is a task of Flux's; its ranks have their own numbers, and the exit code is that of the program."""
    flux = job(tmp_path / "flux", socket.gethostname())
    # A rank that fails ends the others: each waits until both have printed.
    program = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
print(rank, os.environ["WORLD_SIZE"], "PMI_RANK" in os.environ, flush=True)
pathlib.Path(f"printed{rank}").touch()
while not (os.path.exists("printed0") and os.path.exists("printed1")):
    time.sleep(0.01)
sys.exit(3)
"""
    (tmp_path / "t.py").write_text(program)
    command = [sys.executable, "-m", "mmm_launch", "-n", "2", "python3", "t.py"]
    environ = os.environ | flux.environ
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert sorted(done.stdout.splitlines())[-2:] == ["0 2 False", "1 2 False"]
    assert done.returncode == 3
    assert [call[0] for call in flux.calls()] == ["getattr", "resource", "run"]


def test_a_file_of_a_machine_may_name_flux(tmp_path):
    path = tmp_path / "mine.json"
    machine = {"name": "Mine", "scheduler": "flux", "match": {"CLUSTER": "^mine$"}, "ranks_per_host": 4}
    path.write_text(json.dumps(machine))
    flux = job(tmp_path / "flux", "n[1-2]")
    made = plan(flux.environ | {"MMM_MACHINES": str(path), "CLUSTER": "mine"})
    assert (made.machine.value.name, made.ranks) == ("Mine", 8)
