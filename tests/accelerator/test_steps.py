"""A rank's steps on CUDA and XPU devices that are not there: nothing mixes devices, the host waits for rows alone, and
the clock knows how long the rank waits for others.

The layouts are those of the parity matrix, but for DDP, whose transfers need elements, and pipelines, of which there
are two: which groups their messages go through.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Where the compiled library stays between runs.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mmm" / "tests"
# Where CI asks for it, a missing compiler is a failure.
STRICT = os.environ.get("MMM_CLUSTER_TESTS") == "required"
KINDS = ("cuda", "xpu")
# The collectives of a row of TABLE.
COLUMNS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "receive")


@pytest.fixture(scope="module")
def library():
    """device.cpp, compiled once for this torch."""
    source = HERE / "device.cpp"
    torch = Path(find_spec("torch").origin).parent
    if (compiler := shutil.which("g++")) is None:
        (pytest.fail if STRICT else pytest.skip)("g++ is missing: no device that is not there can be made")
    version = (torch / "version.py").read_bytes()
    made = CACHE / f"device-{hashlib.sha256(source.read_bytes() + version).hexdigest()[:16]}.so"
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = made.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch}/include", source]
        subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-o", partial], check=True)
        partial.replace(made)
    return made


def steps(library, output, cases):
    """What steps.py says of the cases, by kind of device: a list of answers."""
    command = [sys.executable, HERE / "steps.py", library, output, json.dumps(cases)]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    answers = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    assert len(answers) == sum(map(len, cases.values())), done.stderr
    return answers


def name(answer):
    case = dict(answer["case"])
    model = case.pop("model")
    layout = case.pop("layout")
    return " ".join(
        [answer["kind"], model, layout, *(word if value is True else str(value) for word, value in case.items())]
    )


# What a rank runs by kind of device; steps.py reads the keys.
CASES = {
    "cuda": [
        {"model": "transformer", "layout": "dp2.tp2"},
        {"model": "transformer", "layout": "dp_replicate2.dp_shard2", "data_parallel": "hsdp"},
        {"model": "transformer", "layout": "1", "checkpointing": "full"},
        {"model": "qwen3", "layout": "1", "data": "packed", "checkpointing": "selective"},
        {"model": "moe", "layout": "dp2"},
        {"model": "moe", "layout": "dp2.ep2"},
        {"model": "moe", "layout": "dp2.ep2", "offload": True},
        {"model": "cnn", "layout": "dp2", "data_parallel": "zero1"},
    ],
    "xpu": [
        {"model": "transformer", "layout": "dp2.cp2"},
        {"model": "qwen3", "layout": "1", "data": "packed", "checkpointing": "selective"},
        {"model": "moe", "layout": "dp2.tp2.ep2"},
        {"model": "vit", "layout": "tp2"},
        {"model": "cnn", "layout": "tp2"},
        {"model": "cnn", "layout": "dp2", "data_parallel": "zero2"},
    ],
}


@pytest.fixture(scope="module")
def answers(library, tmp_path_factory):
    return {name(answer): answer for answer in steps(library, tmp_path_factory.mktemp("steps") / "out", CASES)}


# Collectives of a step without a row, in the order of COLUMNS. Two micro-batches; gradients are summed with the second.
TABLE = {
    "cuda transformer 1 full": (0, 0, 0, 0, 0, 0),
    "cuda qwen3 1 packed selective": (0, 0, 0, 0, 0, 0),
    "cuda transformer dp2.tp2": (34, 24, 14, 0, 0, 0),
    "cuda transformer dp_replicate2.dp_shard2 hsdp": (14, 4, 5, 0, 0, 0),
    "cuda moe dp2": (14, 4, 2, 0, 0, 0),
    "cuda moe dp2.ep2": (14, 4, 3, 20, 0, 0),
    "cuda moe dp2.ep2 offload": (14, 4, 3, 20, 0, 0),
    "cuda cnn dp2 zero1": (8, 0, 9, 0, 0, 0),
    "xpu qwen3 1 packed selective": (0, 0, 0, 0, 0, 0),
    "xpu transformer dp2.cp2": (14, 4, 1, 0, 16, 16),
    "xpu moe dp2.tp2.ep2": (34, 18, 20, 20, 0, 0),
    "xpu vit tp2": (0, 0, 21, 0, 0, 0),
    "xpu cnn tp2": (0, 0, 5, 0, 0, 0),
    "xpu cnn dp2 zero2": (8, 8, 1, 0, 0, 0),
}


def names(cases):
    return [name({"kind": kind, "case": case}) for kind in KINDS for case in cases[kind]]


def check(answer):
    """Nothing went wrong; without offload the host waits for the device in a row alone, and there once."""
    assert "error" not in answer, answer["error"]
    (without, collectives), (with_row, more) = answer["without"], answer["with"]
    # Of each mesh one product of all tensors, and one that counts its steps.
    kernels = 2 * answer["groups"]
    assert without["optimizer kernels"] == with_row["optimizer kernels"] == kernels
    alone = not collectives
    assert more == {**collectives, **({} if alone else {"all_gather": collectives.get("all_gather", 0) + 1})}
    check_own_work(answer)
    if answer["case"].get("offload"):
        # The host's optimizer waits for its gradients.
        return
    assert without.get("synchronizations", 0) == 0
    # With ep a layer of experts has to know how many tokens come, and so it has where no kernel takes all experts.
    read = "ep" in answer["case"]["layout"] or answer["kind"] == "xpu"
    assert without.get("reads", 0) == answer["expert_forwards"] * read
    assert with_row["synchronizations"] == 1
    assert with_row["reads"] == without.get("reads", 0) + 1


def check_own_work(answer):
    """Where other ranks are late, the rank waits. Where it is late itself, that is its own work. Seconds of three rows:
    nobody is late, the others are, this one is.
    """
    rows = answer["rows"]
    late = answer["late"]
    if answer["case"].get("offload"):
        assert all(math.isnan(row["own"]) for row in rows)
        return
    own, own_with_late_others, own_when_late = (row["own"] for row in rows)
    assert 0 < own < rows[0]["seconds"]
    assert own_with_late_others == pytest.approx(own, abs=1e-6)
    assert own_when_late == pytest.approx(own + late, abs=1e-6)
    calls = sum(answer["without"][1].values())
    # Computation hides little of the others' lateness. A rank alone has nobody to wait for.
    assert (rows[1]["seconds"] > late) == (calls > 0)
    assert rows[2]["seconds"] == pytest.approx(late, abs=0.05)
    # Two events for each wait, one for each lap of the clock. Some calls are waited for twice.
    assert answer["events"] <= 4 * calls + 20, calls


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", names(CASES))
def test_a_step(answers, case):
    check(answers[case])
    collectives = answers[case]["without"][1]
    assert tuple(collectives.get(kind, 0) for kind in COLUMNS) == TABLE[case]
    assert collectives.keys() <= set(COLUMNS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_one_kernel_on_cuda(answers, kind):
    """Two layers and two micro-batches. Selective checkpointing keeps its output, and does not compute it again."""
    without, _ = answers[f"{kind} qwen3 1 packed selective"]["without"]
    calls = 4 if kind == "cuda" else 0
    assert [without.get(name, 0) for name in ("_varlen_attn", "_varlen_attn_backward")] == [calls, calls]


PIPELINES = {
    "cuda": [{"model": "transformer", "layout": "pp2.dp2", "schedule": "1F1B"}],
    "xpu": [{"model": "transformer", "layout": "pp4", "schedule": "GPipe"}],
}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_direction_of_a_pipeline_has_a_group_of_its_own(library, tmp_path):
    for answer in steps(library, tmp_path / "out", PIPELINES):
        check(answer)
        messages = {call: count for call, count in answer["without"][0].items() if call.startswith(("isend", "irecv"))}
        assert messages == {"isend (0, 1)": answer["microbatches"], "irecv (1, 0)": answer["microbatches"]}
