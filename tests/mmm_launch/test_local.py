"""How many ranks, by the accelerators of made-up machines; with which environment; forked or spawned, and why."""

import pytest

from mmm_launch.program.target import Target
from mmm_launch.spec import accelerators, host_spec
from mmm_launch.spec import plan as planning
from mmm_launch.spec.accelerators import Accelerators
from mmm_launch.spec.options import LaunchOptions

TRAIN = Target("module", "train")
# What is found on a host.
NONE = Accelerators(None, 0, "0 NVIDIA GPUs")
GPUS = Accelerators("cuda", 8, "8 NVIDIA GPUs")
TILES = Accelerators("xpu", 12, "12 Intel GPU tiles")


def plan(target=TRAIN, environ=None, devices=NONE, build="cuda", nproc=None, device=None, **more):
    options = LaunchOptions(nproc=nproc, device=device, **more)
    return planning.plan(target, options, environ=environ or {}, local=devices, build=build)


def on_host(build="cuda", **change):
    made = plan(build=build, **change)
    return host_spec.make(made.target, made.host_command(0, 0, made.variables), build)


@pytest.mark.parametrize(
    ("change", "ranks", "device", "note"),
    [
        ({"devices": GPUS}, 8, "cuda", ""),
        ({}, 4, "cpu", "no accelerator found (0 NVIDIA GPUs): 4 ranks a host (choose with -n)"),
        # a Mac
        ({"devices": Accelerators(None, 0, "torch is built for CPU"), "device": "mps"}, 1, "mps", ""),
        ({"devices": GPUS, "device": "cpu"}, 4, "cpu", "CPU was chosen: 4 ranks a host (choose with -n)"),
        ({"devices": GPUS, "environ": {"MMM_DEVICE": "cpu"}}, 4, "cpu", "4 ranks a host (choose with -n)"),
        ({"device": "xpu"}, 1, "xpu", "no xpu found"),
        # The device is left to the ranks.
        ({"nproc": 2}, 2, None, ""),
    ],
    ids=str,
)
def test_ranks_and_their_device(change, ranks, device, note):
    made = plan(**change)
    assert (made.ranks, made.variables.get("MMM_DEVICE"), len(made.notes)) == (ranks, device, bool(note))
    assert note in "".join(made.notes)
    if ranks == 8:
        assert made.counts.source == "one per accelerator: 8 NVIDIA GPUs on this host"


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
        ({}, ""),
        ({"devices": GPUS}, ""),
        ({"build": "xpu", "device": "cpu"}, ""),
        ({"devices": TILES, "build": "xpu"}, "Intel GPU"),
        ({"device": "xpu"}, "Intel GPU"),
        ({"no_prefork": True}, "--no-prefork"),
        ({"target": Target("program", "bash", command=("bash",))}, "the command is not"),
    ],
)
def test_where_ranks_are_forked_and_why_not(change, reason):
    made = on_host(**change)
    assert made.fork == (not reason)
    assert reason in made.start


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_a_number_of_threads_that_is_none_is_as_if_it_were_not_set(text):
    """Ranks share the cores, as where nobody says how many threads they have. Any other is passed on as it is."""
    counted = on_host(nproc=2).shared["OMP_NUM_THREADS"]
    assert int(counted) > 0
    assert on_host(nproc=2, environ={"OMP_NUM_THREADS": text}).shared["OMP_NUM_THREADS"] == counted
    assert on_host(nproc=2, variables=[("OMP_NUM_THREADS", text)]).shared["OMP_NUM_THREADS"] == counted
    for nproc in ("3", "4,2"):
        assert on_host(nproc=2, environ={"OMP_NUM_THREADS": nproc}).shared["OMP_NUM_THREADS"] == nproc


def make(root, **files):
    """Files below root, by path with `__` for each slash."""
    for path, text in files.items():
        file = root / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def count(root, build, **environ):
    return accelerators.find(root, environ, build).count


@pytest.fixture
def nvidia(tmp_path):
    make(tmp_path, **{f"dev__nvidia{n}": "" for n in ("0", "1", "2", "3", "ctl", "-uvm")})
    return tmp_path


@pytest.fixture
def amd(tmp_path):
    # node 0 is the CPU
    for node, simds in enumerate((0, 304, 304)):
        name = f"sys__class__kfd__kfd__topology__nodes__{node}__properties"
        make(tmp_path, **{name: f"cpu_cores_count 0\nsimd_count {simds}\nmem_banks_count 1\n"})
    return tmp_path


@pytest.fixture
def intel(tmp_path):
    # card2 has a display: a desktop's graphics
    for card in (0, 1, 2):
        make(
            tmp_path,
            **{
                f"sys__class__drm__card{card}__device__vendor": "0x8086\n",
                f"sys__class__drm__card{card}__device__class": "0x030000\n" if card == 2 else "0x038000\n",
                f"sys__class__drm__card{card}__gt__gt0__id": "0\n",
                f"sys__class__drm__card{card}__gt__gt1__id": "1\n",
                f"sys__class__drm__card{card}-DP-1__status": "\n",
            },
        )
    return tmp_path


def test_in_words(nvidia, tmp_path_factory):
    expected = "1 NVIDIA GPU (CUDA_VISIBLE_DEVICES=1)"
    assert accelerators.find(nvidia, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda") == Accelerators("cuda", 1, expected)
    assert accelerators.find(nvidia, {}, "cpu") == Accelerators(None, 0, "torch is built for CPU")
    for build in ("cuda", "hip", "xpu", "cpu"):
        assert accelerators.find(tmp_path_factory.mktemp("none"), {}, build).device is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0,2", 2),
        ("0,-1,2", 1),
        ("3", 1),
        ("4", 0),
        ("0,0", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        # CUDA shows a process the first alone.
        ("MIG-1,MIG-2", 1),
    ],
)
def test_nvidia_as_cuda_shows_them(nvidia, value, expected):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert count(nvidia, "cuda", **environ) == expected


def test_amd_is_torchs_cuda(amd):
    assert accelerators.find(amd, {}, "hip").device == "cuda"
    assert count(amd, "hip") == 2
    assert count(amd, "hip", ROCR_VISIBLE_DEVICES="1") == 1
    assert count(amd, "hip", HIP_VISIBLE_DEVICES="0,1") == 2
    assert count(amd, "hip", ROCR_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="0") == 1


def test_a_closed_amd_node_is_not_ours(amd):
    properties = amd / "sys/class/kfd/kfd/topology/nodes/2/properties"
    properties.unlink()
    # Cannot be read as a file, root or not.
    properties.mkdir()
    assert count(amd, "hip") == 1


def test_intel_counts_tiles_of_data_centre_cards(intel):
    assert count(intel, "xpu") == 4
    assert count(intel, "xpu", ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE") == 2
    assert count(intel, "xpu", ZE_AFFINITY_MASK="0,3") == 2
    assert count(intel, "xpu", ZE_AFFINITY_MASK="7") == 0
    assert count(intel, "xpu", ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE", ZE_AFFINITY_MASK="0.0,0.1") == 1


def test_intel_tiles_under_the_xe_driver(tmp_path):
    make(
        tmp_path,
        sys__class__drm__card0__device__vendor="0x8086",
        sys__class__drm__card0__device__class="0x038000",
        sys__class__drm__card0__device__tile0__gt0__id="0",
        sys__class__drm__card0__device__tile1__gt0__id="0",
    )
    assert count(tmp_path, "xpu") == 2
