"""The prover needs PyTorch alone: nothing else of this project, and no NumPy."""

import subprocess
import sys

import pytest

from mmm_verify import memory
from support.clock import PATIENCE

# Packages that have to work where only PyTorch is installed.
ROOMS = ("mmm_verify", "mmm_verify.program", "mmm_verify.propose", "mmm_verify.ranks", "mmm_verify.testing")
ALONE = f"""
import importlib, pkgutil, sys

sys.modules["numpy"] = None
for room in {ROOMS}:
    package = importlib.import_module(room)
    for module in pkgutil.iter_modules(package.__path__, room + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*(name for name in sys.modules if name.startswith("mmm") and not name.startswith("mmm_verify")))
"""
PROVEN = """
import sys

sys.modules["numpy"] = None
import torch
import torch.distributed as dist

from mmm_verify import verify


def average(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(mesh.size())))


def model():
    return torch.nn.Linear(3, 2)


def batch():
    return torch.randn(8, 3), torch.randn(8, 2)


for parallelize in (average, lambda model, mesh: None):
    print(verify(model, parallelize, batch, mesh="dp2").result)
"""


def run(code):
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def test_it_imports_nothing_else_of_ours():
    assert run(ALONE).split() == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_no_torch_until_it_is_used(room):
    assert run(f"import sys, {room}; print('torch' in sys.modules)") == "False\n"


def test_it_proves_without_numpy():
    # Gloo of 2.8 to 2.10 prints there as well, also in the middle of lines.
    lines = [line for line in run(PROVEN).splitlines() if line.endswith("same")]
    assert lines == ["same", "not the same"]


GIB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A host with 8 GiB free, and a process in the group /job/step."""
    step = tmp_path / "groups/job/step"
    step.mkdir(parents=True)
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\nSwapFree: 0 kB\n")
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    for folder, limit, used in ((step, "max", 0), (step.parent, str(4 * GIB), 3 * GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file 0\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    return tmp_path


def test_the_least_that_a_group_over_it_allows(system):
    assert memory.free_memory() == 2 * GIB


def test_without_groups(system):
    (system / "cgroup").write_text("4:memory:/job/step\n")
    assert memory.free_memory() == 8 * GIB


def test_a_system_that_does_not_tell(system):
    (system / "meminfo").unlink()
    assert memory.free_memory() is None
