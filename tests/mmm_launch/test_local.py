"""How many ranks, with which environment, forked or spawned, and why."""

import pytest

from mmm_launch.program.target import Target
from mmm_launch.spec import accelerators, host_spec
from mmm_launch.spec import plan as planning
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.options import LaunchOptions

TRAIN = Target("module", "train")
NONE = Accelerators(None, 0, "0 NVIDIA GPUs")
GPUS = Accelerators("cuda", 8, "8 NVIDIA GPUs")
TILES = Accelerators("xpu", 12, "12 Intel GPU tiles")


def plan(target=TRAIN, environ=None, found=NONE, build="cuda", nproc=None, device=None, **more):
    options = LaunchOptions(nproc=nproc, device=device, **more)
    return planning.plan(target, options, environ=environ or {}, found=found, build=build)


def on_host(build="cuda", **change):
    made = plan(build=build, **change)
    return host_spec.make(made.target, made.host_command(0, 0, made.variables), build)


def test_one_rank_per_accelerator():
    made = plan(found=GPUS)
    assert (made.ranks, made.device.value, made.notes) == (8, "cuda", ())
    assert made.counts.source == "one per accelerator: 8 NVIDIA GPUs on this host"


def test_four_cpu_ranks_without_any_and_it_says_so():
    made = plan()
    assert (made.ranks, made.device.value) == (4, "cpu")
    assert made.notes == ("no accelerator found (0 NVIDIA GPUs): 4 ranks a host (choose with -n)",)


def test_a_mac(tmp_path):
    found = accelerators.find(tmp_path, {}, "cpu")
    made = plan(found=found)
    assert (made.ranks, made.device.value) == (4, "cpu")
    made = plan(found=found, device="mps")
    assert (made.ranks, made.device.value, made.notes) == (1, "mps", ())


def test_cpu_by_choice_on_a_host_with_accelerators():
    made = plan(found=GPUS, device="cpu")
    assert (made.ranks, made.variables["MMM_DEVICE"]) == (4, "cpu")
    assert made.notes == ("CPU was chosen: 4 ranks a host (choose with -n)",)


def test_the_device_asked_for_is_not_there():
    made = plan(device="xpu")
    assert (made.ranks, made.device.value) == (1, "xpu")
    assert "no xpu found" in made.notes[0]


def test_with_n_and_no_accelerator_the_device_is_left_to_the_ranks():
    made = plan(nproc=2)
    assert "MMM_DEVICE" not in made.variables
    assert made.notes == ()


def test_the_users_device_variable_counts_as_the_option():
    assert plan(environ={"MMM_DEVICE": "cpu"}, found=GPUS).device.value == "cpu"


def test_environment():
    made = on_host(nproc=2)
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in made.ranks] == [("0", "0"), ("1", "1")]
    assert made.shared["WORLD_SIZE"] == made.shared["LOCAL_WORLD_SIZE"] == "2"
    assert made.shared["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(made.shared["MASTER_PORT"]) < 65536
    assert made.shared["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"found": TILES, "build": "xpu"}, "Intel GPU"),
        ({"device": "xpu"}, "Intel GPU"),
        ({"no_prefork": True}, "--no-prefork"),
        ({"target": Target("program", "bash", command=("bash",))}, "the command is not"),
    ],
)
def test_where_ranks_are_spawned(change, reason):
    made = on_host(**change)
    assert not made.fork
    assert reason in made.start


def test_where_ranks_are_forked():
    assert on_host().fork
    assert on_host(found=GPUS).fork
    assert on_host(build="xpu", device="cpu").fork


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_a_number_of_threads_that_is_none_is_as_if_it_were_not_set(text):
    """Ranks share the cores, as where nobody says how many threads they have."""
    counted = on_host(nproc=2).shared["OMP_NUM_THREADS"]
    assert int(counted) > 0
    assert on_host(nproc=2, environ={"OMP_NUM_THREADS": text}).shared["OMP_NUM_THREADS"] == counted
    assert on_host(nproc=2, variables=[("OMP_NUM_THREADS", text)]).shared["OMP_NUM_THREADS"] == counted


def test_a_number_of_threads_is_passed_on_as_it_is():
    for text in ("3", "4,2"):
        assert on_host(nproc=2, environ={"OMP_NUM_THREADS": text}).shared["OMP_NUM_THREADS"] == text
