"""Counting accelerators in made-up machines."""

import pytest

from mmm_launch.spec import accelerators
from mmm_launch.spec.accelerators import Accelerators


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
    for node, simds in enumerate((0, 304, 304)):  # node 0 is the CPU
        name = f"sys__class__kfd__kfd__topology__nodes__{node}__properties"
        make(tmp_path, **{name: f"cpu_cores_count 0\nsimd_count {simds}\nmem_banks_count 1\n"})
    return tmp_path


@pytest.fixture
def intel(tmp_path):
    for card in (0, 1, 2):  # card2 has a display: a desktop's graphics
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


def test_no_device_files_mean_none(tmp_path):
    for build in ("cuda", "hip", "xpu", "cpu"):
        assert accelerators.find(tmp_path, {}, build).device is None


def test_a_cpu_build_of_torch_uses_none(nvidia):
    assert accelerators.find(nvidia, {}, "cpu") == Accelerators(None, 0, "torch is built for CPU")


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
        ("MIG-1,MIG-2", 1),  # CUDA shows a process the first alone
    ],
)
def test_nvidia_as_cuda_shows_them(nvidia, value, expected):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert count(nvidia, "cuda", **environ) == expected


def test_nvidia_in_words(nvidia):
    found = accelerators.find(nvidia, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda")
    assert found == Accelerators("cuda", 1, "1 NVIDIA GPU (CUDA_VISIBLE_DEVICES=1)")


def test_amd_is_torchs_cuda(amd):
    assert accelerators.find(amd, {}, "hip").device == "cuda"
    assert count(amd, "hip") == 2
    assert count(amd, "hip", ROCR_VISIBLE_DEVICES="1") == 1
    assert count(amd, "hip", HIP_VISIBLE_DEVICES="0,1") == 2
    assert count(amd, "hip", ROCR_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="0") == 1


def test_a_closed_amd_node_is_not_ours(amd):
    properties = amd / "sys/class/kfd/kfd/topology/nodes/2/properties"
    properties.unlink()
    properties.mkdir()  # cannot be read as a file, root or not
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
