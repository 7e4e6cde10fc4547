"""The prover needs PyTorch alone: nothing else of this project, and no NumPy."""

import subprocess
import sys

import pytest

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
