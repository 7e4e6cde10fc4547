"""Files of machines: all that come with the package can be used, and name their sources; wrong ones are refused."""

import json
import re

import pytest

from mmm_lab.planner.machine_text import settings
from mmm_lab.planner.network import peak_rate
from mmm_launch.errors import MachineError
from mmm_launch.machines.find import BUILT_IN, load
from mmm_launch.machines.machine import Machine, read

KNOWN = load({})
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
    ("content", "words"),
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
        ({"scheduler": "lsf"}, "pbs or slurm"),
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
def test_wrong_files(tmp_path, content, words):
    path = written(tmp_path, content if isinstance(content, str) else {**GOOD, **content})
    with pytest.raises(MachineError, match=re.escape(words)) as caught:
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
    whole = read(written(tmp_path, GOOD)).changed({})
    assert (whole.device, whole.hosts, whole.ranks_per_host) == ("cuda", 1, 1)


def test_each_setting_is_shown_with_its_source():
    rows = settings(KNOWN["perlmutter"])
    assert any(re.match(r"port +29,500 +https://docs.nersc.gov/", row) for row in rows)
    (row,) = [row for row in rows if row.startswith("FI_MR_CACHE_MONITOR ")]
    assert re.match(r"\S+ +userfaultfd +Perlmutter: https://github.com/NERSC/sc24", row)


def test_kernels_and_messages_take_time_where_a_file_does_not_say_how_much():
    machine = Machine("mine")
    assert min(machine.layer_overhead, machine.link_latency, machine.network_latency) > 0
