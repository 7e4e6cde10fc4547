"""Devices and data types: chosen, or refused with the reason. Peaks of accelerators by the names that their drivers
have. How much memory is left: of the host, and within control groups, from made-up system files."""

import os

import pytest
import torch

from mmm.errors import DeviceError
from mmm.runtime import device as devices
from mmm.runtime.memory import device_memory, host_memory
from mmm.runtime.peaks import PEAKS, named_peak
from mmm.runtime.ranks import Rank

ALONE = Rank(0, 1, 0, 1, "alone")
FOUR = Rank(1, 4, 1, 4, "launch")
LAST = Rank(3, 4, 3, 4, "slurm")


@pytest.fixture
def accelerators(monkeypatch):
    """Pretend that this machine has some."""

    def pretend(**counts):
        monkeypatch.setattr(devices, "is_available", lambda kind: kind == "cpu" or counts.get(kind, 0) > 0)
        for kind in ("cuda", "xpu"):
            monkeypatch.setattr(getattr(torch, kind), "device_count", lambda kind=kind: counts.get(kind, 0))
            monkeypatch.setattr(getattr(torch, kind), "set_device", lambda device: None)
        monkeypatch.delenv("MMM_DEVICE", raising=False)

    return pretend


@pytest.mark.parametrize(
    ("counts", "rank", "asked", "device"),
    [
        ({}, FOUR, "auto", "cpu"),
        ({"cuda": 4}, FOUR, "auto", "cuda:1"),
        # A scheduler that shows each rank its own.
        ({"cuda": 1}, FOUR, "auto", "cuda:0"),
        # Two of its own
        ({"cuda": 2}, LAST, "auto", "cuda:1"),
        ({"xpu": 12}, FOUR, "auto", "xpu:1"),
        ({"cuda": 4}, FOUR, "cpu", "cpu"),
        ({"mps": 1}, ALONE, "auto", "cpu"),
        ({"mps": 1}, ALONE, "mps", "mps"),
        ({"mps": 1}, FOUR, "auto", "cpu"),
    ],
)
def test_choice(accelerators, counts, rank, asked, device):
    accelerators(**counts)
    assert str(devices.choose_device(asked, rank)) == device


def test_launch_decides_unless_the_flag_does(accelerators, monkeypatch):
    accelerators(cuda=4)
    monkeypatch.setenv("MMM_DEVICE", "cpu")
    assert devices.choose_device("auto", FOUR).type == "cpu"
    assert devices.choose_device("cuda", FOUR).type == "cuda"


@pytest.mark.parametrize(
    ("counts", "asked", "message"),
    [
        ({}, "cuda", "sees no cuda device here"),
        ({}, "tpu", "'tpu' is not one of auto, cpu"),
        ({"mps": 1}, "mps", "mps is one device"),
    ],
)
def test_refused(accelerators, counts, asked, message):
    accelerators(**counts)
    with pytest.raises(DeviceError, match=message):
        devices.choose_device(asked, FOUR)


@pytest.mark.parametrize("real", [True, False])
def test_bf16_where_an_accelerator_computes_in_it(monkeypatch, real):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: real)
    precision = devices.choose_precision("auto", torch.device("cuda"))
    assert precision.name == ("bf16" if real else "fp32")
    assert precision.mixed is real
    assert precision.storage == torch.float32
    assert precision.reason == ("cuda computes in bf16" if real else "cuda would emulate bf16")


def test_float64_everywhere_but_on_mps():
    assert devices.choose_precision("fp64", torch.device("cpu")).compute == torch.float64
    with pytest.raises(DeviceError, match="no float64"):
        devices.choose_precision("fp64", torch.device("mps"))
    assert devices.choose_precision("auto", torch.device("mps")).name == "fp32"
    for mixed in ("bf16", "fp16"):
        with pytest.raises(DeviceError, match=f"--dtype {mixed}"):
            devices.choose_precision(mixed, torch.device("mps"))


def algorithms():
    cudnn = torch.backends.cudnn
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *asked, cudnn.deterministic, cudnn.benchmark, torch.backends.mkldnn.deterministic


def test_deterministic_algorithms_for_the_length_of_a_block(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = algorithms()
    with devices.deterministic(False, torch.device("cpu")):
        assert algorithms() == before
    with devices.deterministic(True, torch.device("cpu")):
        assert algorithms() == (True, False, True, False, True)
    assert algorithms() == before


def test_cublas_has_a_workspace_of_a_fixed_size(monkeypatch):
    """Set before CUDA starts; what the user has set stays, if it is one that NVIDIA names, and is refused otherwise."""
    cuda = torch.device("cuda", 0)
    # So that the variable is gone after the test.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with devices.deterministic(True, cuda):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with devices.deterministic(True, cuda):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(DeviceError, match="only with :4096:8 or :16:8"), devices.deterministic(True, cuda):
        pass


def test_an_accelerators_backend_alone():
    """gloo beside it would connect all ranks to all."""
    assert devices.backend_for(torch.device("cuda")) == "nccl"
    assert devices.backend_for(torch.device("cpu")) == "gloo"


def test_devices_in_use(accelerators, monkeypatch):
    accelerators(cuda=8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    assert devices.devices_in_use(torch.device("cuda", 0), 4) == "4 ranks on H200"
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert devices.devices_in_use(torch.device("cpu"), 2) == "2 ranks on 16 CPU cores"


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("Intel(R) Data Center GPU Max 1550", "fp64", 26e12),
        ("AMD Radeon", "bf16", None),
        ("NVIDIA A100-SXM4-40GB", "fp8", None),
    ],
)
def test_peaks_by_name(name, dtype, peak):
    assert named_peak(name, dtype) == peak


def test_each_accelerator_has_all_rates():
    for rates in PEAKS.values():
        assert set(rates) == {"bf16", "fp32", "fp64"}


MB = 10**6


@pytest.mark.parametrize(
    ("own_group", "limits", "expected"),
    [
        ("job/step", {}, None),
        ("job/step", {"job/step": "max"}, None),
        ("job/step", {"job/step": "max", "job": 8 * MB}, 8 * MB),
        ("job/step", {"job/step": 6 * MB, "job": 8 * MB}, 6 * MB),
        ("job", {"job": 10**18}, None),
        ("", {"": 8 * MB}, 8 * MB),
    ],
)
def test_a_job_has_no_more_memory_than_its_control_groups_allow(tmp_path, own_group, limits, expected):
    """`limits`: memory.max of each control group. None stands for all memory of this host."""
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text(f"0::/{own_group}\n")
    for name, limit in limits.items():
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory(tmp_path) == (expected or everything)


def test_a_system_without_control_groups_has_all_its_memory(tmp_path):
    assert host_memory(tmp_path) > 10**8
    assert device_memory(torch.device("cpu")) is None
