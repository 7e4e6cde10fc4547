"""Which machine it is; a new one is one JSON file for `launch`, `mmm plan` and `mmm doctor`; wrong files are refused;
what a queue takes."""

import json
import os
import re
import subprocess
import sys

import pytest

from mmm_lab.cli.doctor.job import check_machine
from mmm_lab.planner.machine_text import settings
from mmm_lab.planner.measured import machine_here, measured_path
from mmm_lab.planner.network import peak_rate
from mmm_launch.errors import MachineError
from mmm_launch.machines.find import BUILT_IN, find, load, named
from mmm_launch.machines.machine import FIELDS, Machine, read
from mmm_launch.machines.queues import limits_of, not_taken, queue_for
from support.clock import PATIENCE

# A machine that mmm does not know.
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
# A job on it.
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CLUSTER_NAME": "mine"}


def put(folder, name, **values):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, **values}))
    return path


def command(folder, *argv, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MMM_", "SLURM_", "PBS_"))}
    options = {"cwd": folder, "env": environ | {"HOME": str(folder)} | variables, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-m", *argv], timeout=PATIENCE, check=False, **options)


@pytest.mark.long
def test_a_new_machine_is_one_file_for_all_commands(tmp_path):
    """Nothing else is written, and nothing of the package changes."""
    (tmp_path / "mine.json").write_text(json.dumps(MINE))
    (tmp_path / "train.py").write_text("")
    variables = {"MMM_MACHINES": str(tmp_path / "mine.json")}
    launched = command(tmp_path, "mmm_launch", "--dry-run", "python3", "train.py", **variables, **JOB)
    assert launched.returncode == 0, launched.stderr
    assert "--cpus-per-task=48" in launched.stdout
    assert re.search(r"NCCL_SOCKET_IFNAME +ib7 ", launched.stdout)
    assert "6 a host" in launched.stdout
    flags = ["--model", "gpt2", "--site", "mine", "--nhosts", "2", "--global-batch", "48", "--explain"]
    planned = command(tmp_path, "mmm_lab.cli.main", "plan", *flags, "--script", "job.sh", **variables)
    assert planned.returncode == 0, planned.stderr
    assert "Mine: 2 × 6 devices of 37 GiB" in planned.stdout
    assert "its data sheet" in planned.stdout
    assert "#SBATCH -N 2 -p mine" in (tmp_path / "job.sh").read_text()
    examined = command(tmp_path, "mmm_lab.cli.doctor.examine", "machine", ".", "30", **variables, **JOB)
    _, status, seen, _ = json.loads(examined.stdout)
    assert status == "ok"
    assert f"Mine (SLURM_CLUSTER_NAME=mine), {tmp_path}/mine.json: 6 devices a host" in seen
    listed = command(tmp_path, "mmm_lab.cli.main", "machine", **variables)
    assert "\nmine " in listed.stdout


def test_a_file_that_is_wrong_is_named_by_all_commands(tmp_path, monkeypatch):
    (tmp_path / "mine.json").write_text(json.dumps(MINE | {"ranks_per_hots": 6}))
    variables = {"MMM_MACHINES": str(tmp_path)}
    wrong = "'ranks_per_hots' is not known. Did you mean ranks_per_host?"
    refusal = f"machine file {tmp_path}/mine.json: {wrong} There are {', '.join(FIELDS)}."
    (tmp_path / "train.py").write_text("")
    launched = command(tmp_path, "mmm_launch", "--dry-run", "python3", "train.py", **variables, **JOB)
    assert (launched.returncode, launched.stderr) == (2, f"launch: error: {refusal}\n")
    planned = command(
        tmp_path, "mmm_lab.cli.main", "plan", "--model", "gpt2", "--site", "mine", "--nhosts", "1", **variables
    )
    assert (planned.returncode, planned.stderr) == (2, f"mmm: error: {refusal}\n")
    for name, value in (variables | JOB).items():
        monkeypatch.setenv(name, value)
    (finding,) = check_machine(tmp_path, 5)
    assert (finding.status, finding.seen) == ("fail", refusal)


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
    machine = machine_here("cuda", "Polaris", 2, 8)
    assert (machine.name, machine.hosts, machine.ranks_per_host) == ("Polaris", 2, 4)
    assert machine_here("xpu", "Polaris", 2, 8) is None
    assert machine_here("cuda", "Sophia", 2, 16) is None
    assert machine_here("cuda", None, 1, 1) is None
    assert machine_here("cuda", "nowhere", 1, 1) is None
    measured_path().parent.mkdir()
    measured_path().write_text((BUILT_IN / "laptop.json").read_text())
    machine = machine_here("cpu", "Polaris", 1, 2, threads=4)
    assert (machine.name, machine.ranks_per_host, machine.peak_flops["fp64"]) == ("Laptop", 2, 1e12)


KNOWN = load({})
# The least that a machine's file has to say.
GOOD = {"name": "x", "gpu_memory": 1e9, "memory_bandwidth": 1e9}


def written(folder, data):
    path = folder / "a.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_known_machines():
    sites = {"aurora", "sunspot", "polaris", "perlmutter", "frontier", "sophia"}
    assert sites | {"dgx-h100", "dgx-h200", "laptop"} <= set(KNOWN)
    assert {path.stem for path in BUILT_IN.glob("*.json")} == set(KNOWN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "it is not a JSON object"),
        ("{}", 'one JSON object with a "name"'),
        ('{"name": ""}', 'one JSON object with a "name"'),
        ({"rank_per_host": 2}, "'rank_per_host' is not known"),
        ({"file": "x"}, "'file' is not known"),
        ({"env": {"a": 1}}, "dict[str, str]"),
        ({"ranks_per_host": "2"}, "of type int"),
        ({"device_order": [True]}, "list[int]"),
        ({"device_order": [-1]}, "from 0 to"),
        ({"match": {"X": "("}}, "a regular expression"),
        ({"mpi": "lam"}, "pals, hydra or openmpi"),
        ({"scheduler": "lsf"}, "slurm or flux"),
        ({"queues": ["prod 10 3h"]}, '10-24 3h"'),
        ({"srun": ["-c{cores}"]}, "{cpus}"),
        ({"memory_bandwidht": 1}, "'memory_bandwidht' is not known"),
        ({"memory_bandwidth": "fast"}, "float"),
        ({"memory_bandwidth": -1}, "from 0 to 1e+30"),
        ({"memory_bandwidth": float("nan")}, "from 0 to 1e+30"),
        ({"memory_bandwidth": float("inf")}, "from 0 to 1e+30"),
        ({"gpu_memory": True}, "float"),
        ({"hosts": 1.5}, "int"),
        ({"matmul_efficiency": 1.2}, "from 0 to 1"),
        ({"overlap": 2}, "from 0 to 1"),
        ({"memory_reserve": 2}, "from 0 to 1"),
        ({"peak_flops": 3}, "dict[str, float]"),
        ({"peak_flops": {"bf16": float("nan")}}, "from 0 to 1e+30"),
    ],
    ids=str,
)
def test_wrong_files(tmp_path, content, message):
    path = written(tmp_path, content if isinstance(content, str) else {**GOOD, **content})
    with pytest.raises(MachineError, match=re.escape(message)) as caught:
        read(path)
    assert f"machine file {path}" in str(caught.value)


def test_what_a_prediction_misses_has_a_name(tmp_path):
    """A file for launch alone, or for plan alone, is one: each says what it lacks where it is needed."""
    path = written(tmp_path, {"name": "x", "srun": ["-c{cpus}"], "ranks_per_host": 4})
    machine = read(path)
    assert machine.srun_arguments() == ["-c1"]
    with pytest.raises(MachineError, match="gpu_memory, memory_bandwidth, link_bandwidth of 4") as caught:
        machine.changed({})
    assert str(path) in str(caught.value)
    with pytest.raises(MachineError, match="network_bandwidth of 8"):
        read(written(tmp_path, {**GOOD, "ranks_per_host": 4, "link_bandwidth": 1e9})).changed({"hosts": 2})
    with pytest.raises(MachineError, match="--dtype bf16"):
        peak_rate(read(written(tmp_path, GOOD)), "bf16")
    complete = read(written(tmp_path, GOOD)).changed({})
    assert (complete.device, complete.hosts, complete.ranks_per_host) == ("cuda", 1, 1)


def test_each_setting_is_shown_with_its_source():
    rows = settings(KNOWN["perlmutter"])
    assert any(re.match(r"port +29,500 +https://docs.nersc.gov/", row) for row in rows)
    (row,) = [row for row in rows if row.startswith("FI_MR_CACHE_MONITOR ")]
    assert re.match(r"\S+ +userfaultfd +Perlmutter: https://github.com/NERSC/sc24", row)


def test_kernels_and_messages_take_time_where_a_file_does_not_say_how_much():
    machine = Machine("mine")
    assert min(machine.layer_overhead, machine.link_latency, machine.network_latency) > 0


HOUR = 3600.0


@pytest.mark.parametrize(
    ("site", "queue", "hosts", "hours", "says"),
    [
        ("polaris", "prod", 4, 6, "10 to 24 hosts for 3 h, 25 to 99 hosts for 6 h, 100 to 496 hosts for 24 h"),
        ("polaris", "prod", 4, 6, "; for such a job give --queue capacity or preemptable (Polaris: https://docs.alcf."),
        ("polaris", "prod", 24, 4, "; no queue takes such a job"),
        ("polaris", "prod", 25, 6, ""),
        ("polaris", "capacity", 4, 168, ""),
        ("polaris", "capacity", 5, 1, "1 to 4 hosts for 168 h; for such a job give --queue debug-scaling or"),
        ("polaris", "of-a-reservation", 4, 6, ""),
        ("frontier", "batch", 91, 2.01, "; no queue takes such a job"),
        ("frontier", "batch", 91, 2, ""),
        ("perlmutter", "regular", 4, 1000, ""),
    ],
)
def test_what_a_queue_takes(site, queue, hosts, hours, says):
    machine, _ = find({}, site)
    refusal = not_taken(machine, queue, hosts, hours * HOUR)
    assert says in refusal
    assert bool(says) == bool(refusal)


def test_the_queue_of_a_job():
    polaris, _ = find({}, "polaris")
    assert [queue_for(polaris, hosts, HOUR) for hosts in (2, 4, 10, 560)] == ["debug", "debug-scaling", "prod", "prod"]
    assert queue_for(Machine("own", queue="all"), 4, HOUR) == "all"

    for site in ("polaris", "aurora", "frontier"):
        machine, _ = find({}, site)
        assert machine.queue in {limit.queue for limit in limits_of(machine)}
        assert all(limit.low <= limit.high <= machine.hosts for limit in limits_of(machine))
        assert len(limits_of(machine)) == len(machine.queues)
