"""Files of machines: all that come with the package can be used, and name their sources; wrong ones are refused."""

import json
import re

import pytest

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
        ({"rank_per_host": 2}, "Did you mean 'ranks_per_host'?"),
        ({"file": "x"}, "'file' is not known"),
        ({"env": {"a": 1}}, "an object of strings"),
        ({"ranks_per_host": "2"}, "it has to be a whole number"),
        ({"ranks_per_host": 0}, "at least 1"),
        ({"ranks_per_host": 10**9}, "at most"),
        ({"port": 65536}, "at most 65,535"),
        ({"device_order": [True]}, "a list of whole numbers"),
        ({"device_order": [-1]}, "at least 0"),
        ({"match": {"X": "("}}, "is no regular expression"),
        ({"mpi": "lam"}, "not one of pals"),
        ({"scheduler": "lsf"}, "not one of pbs"),
        ({"queues": ["prod 10 3h"]}, '10-24 3h"'),
        ({"srun": ["-c{cores}"]}, "{per_host}"),
        ({"memory_bandwidth": "fast"}, "a number"),
        ({"memory_bandwidth": -1}, "at least 0"),
        ({"memory_bandwidth": float("nan")}, "at least 0"),
        ({"memory_bandwidth": float("inf")}, "at least 0"),
        ({"gpu_memory": True}, "a number"),
        ({"hosts": 1.5}, "a whole number"),
        ({"matmul_efficiency": 1.2}, "at most 1"),
        ({"matmul_efficiency": 0}, "at least 0.001"),
        ({"overlap": 2}, "at most 1"),
        ({"memory_reserve": 1}, "at most 0.99"),
        ({"peak_flops": 3}, "an object of numbers"),
        ({"peak_flops": {"bf16": float("nan")}}, "at least 0"),
    ],
    ids=str,
)
def test_wrong_files(tmp_path, content, words):
    path = written(tmp_path, content if isinstance(content, str) else {**GOOD, **content})
    with pytest.raises(MachineError, match=re.escape(words)) as caught:
        read(path)
    assert f"machine file {path}" in str(caught.value)


def test_each_setting_is_shown_with_its_source():
    rows = KNOWN["perlmutter"].settings()
    assert any(re.match(r"port +29,500 +https://docs.nersc.gov/", row) for row in rows)
    (row,) = [row for row in rows if row.startswith("FI_MR_CACHE_MONITOR ")]
    assert re.match(r"\S+ +userfaultfd +Perlmutter: https://github.com/NERSC/sc24", row)


def test_kernels_and_messages_take_time_where_a_file_does_not_say_how_much():
    machine = Machine("mine")
    assert min(machine.layer_overhead, machine.link_latency, machine.network_latency) > 0
