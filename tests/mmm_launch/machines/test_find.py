"""Which machine it is, and that a new one is one JSON file for `launch`, `mmm plan` and `mmm doctor`."""

import json
import os
import re
import subprocess
import sys

import pytest

from mmm_lab.cli.doctor.finding import Place
from mmm_lab.cli.doctor.job import check_machine
from mmm_lab.planner.measured import machine_here, measured_path
from mmm_launch.errors import MachineError
from mmm_launch.machines import find
from mmm_launch.machines.find import load, named
from mmm_launch.machines.machine import FIELDS
from support.clock import PATIENCE

MINE = {
    "name": "Mine",
    "match": {"SLURM_CLUSTER_NAME": "^mine$"},
    "device": "cuda",
    "hosts": 8,
    "ranks_per_host": 6,
    "cpus_per_host": 48,
    "srun": ["--cpus-per-task={cpus}"],
    "env": {"NCCL_SOCKET_IFNAME": "ib7"},
    "scheduler": "slurm",
    "script": ["#SBATCH -N {hosts} -p mine"],
    "accelerator": "A100",
    "gpu_memory": 40e9,
    "memory_bandwidth": 1.5e12,
    "link_bandwidth": 3e11,
    "network_bandwidth": 1e11,
    "sources": {"gpu_memory": "its data sheet"},
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CLUSTER_NAME": "mine"}


def put(folder, name, **values):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, **values}))
    return path


def command(folder, *argv, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MMM_", "SLURM_", "PBS_"))}
    return subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=folder,
        env=environ | {"HOME": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_new_machine_is_one_file_for_all_commands(tmp_path):
    """Nothing else is written, and nothing of the package changes."""
    (tmp_path / "mine.json").write_text(json.dumps(MINE))
    (tmp_path / "train.py").write_text("")
    mine = {"MMM_MACHINES": str(tmp_path / "mine.json")}
    launched = command(tmp_path, "mmm_launch", "--dry-run", "python3", "train.py", **mine, **JOB)
    assert launched.returncode == 0, launched.stderr
    assert "--cpus-per-task=48" in launched.stdout
    assert re.search(r"NCCL_SOCKET_IFNAME +ib7 ", launched.stdout)
    assert "6 a host" in launched.stdout
    flags = ["--model", "gpt2", "--site", "mine", "--hosts", "2", "--global_batch", "48", "--explain"]
    planned = command(tmp_path, "mmm_lab.cli.main", "plan", *flags, "--script", "job.sh", **mine)
    assert planned.returncode == 0, planned.stderr
    assert "Mine: 2 × 6 devices of 37 GiB" in planned.stdout
    assert "its data sheet" in planned.stdout
    assert "#SBATCH -N 2 -p mine" in (tmp_path / "job.sh").read_text()
    examined = command(tmp_path, "mmm_lab.cli.main", "doctor", "--json", **mine, **JOB)
    (finding,) = [each for each in json.loads(examined.stdout) if each["name"] == "machine"]
    assert finding["status"] == "ok"
    assert f"Mine (SLURM_CLUSTER_NAME=mine), {tmp_path}/mine.json: 6 devices a host" in finding["seen"]
    listed = command(tmp_path, "mmm_lab.cli.main", "machine", **mine)
    assert "\nmine " in listed.stdout


def test_a_file_that_is_wrong_is_named_by_all_commands(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(MINE | {"ranks_per_hots": 6}))
    mine = {"MMM_MACHINES": str(tmp_path)}
    wrong = "'ranks_per_hots' is not known. Did you mean ranks_per_host?"
    said = f"machine file {tmp_path}/mine.json: {wrong} There are {', '.join(FIELDS)}."
    (tmp_path / "train.py").write_text("")
    launched = command(tmp_path, "mmm_launch", "--dry-run", "python3", "train.py", **mine, **JOB)
    assert (launched.returncode, launched.stderr) == (2, f"launch: error: {said}\n")
    planned = command(tmp_path, "mmm_lab.cli.main", "plan", "--model", "gpt2", "--site", "mine", "--hosts", "1", **mine)
    assert (planned.returncode, planned.stderr) == (2, f"mmm: error: {said}\n")
    (finding,) = check_machine(Place(environ=mine | JOB))
    assert (finding.status, finding.seen) == ("fail", said)


def test_the_users_machines_replace_ours(tmp_path):
    places = [tmp_path / "mmm" / "machines", tmp_path / "own"]
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load(environ)["polaris"].hosts == 560
    for hosts, place in enumerate(places, 1):
        path = put(place, "Polaris", hosts=hosts)
        if place.name == "own":
            environ["MMM_MACHINES"] = str(path)
        assert load(environ)["polaris"].hosts == hosts
    with pytest.raises(MachineError, match="MMM_MACHINES"):
        load({"MMM_MACHINES": f"{places[0]}{os.pathsep}/no/such"})


def test_a_name_that_is_not_known():
    assert named({}, "DGX-H100").name == "DGX-H100"
    with pytest.raises(MachineError, match=r"MMM_MACHINES"):
        named({}, "fronteir")


def test_the_machine_of_a_run(tmp_path, monkeypatch):
    """The one that was measured on this host, before that of its site; none where rates are not known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = machine_here("cuda", "Polaris", 2, 8)
    assert (here.name, here.hosts, here.ranks_per_host) == ("Polaris", 2, 4)
    assert machine_here("xpu", "Polaris", 2, 8) is None
    assert machine_here("cuda", "Sophia", 2, 16) is None
    assert machine_here("cuda", None, 1, 1) is None
    assert machine_here("cuda", "nowhere", 1, 1) is None
    measured_path().parent.mkdir()
    measured_path().write_text((find.BUILT_IN / "laptop.json").read_text())
    here = machine_here("cpu", "Polaris", 1, 2, threads=4)
    assert (here.name, here.ranks_per_host, here.peak_flops["fp64"]) == ("Laptop", 2, 1e12)
