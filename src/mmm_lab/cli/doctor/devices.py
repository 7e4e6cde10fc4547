"""torch and its devices: does it import, which devices are there, and do they compute?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmm_lab.cli.doctor.examine import REINSTALL
from mmm_lab.cli.doctor.finding import Finding
from mmm_launch.spec import accelerators

SIZE = 256  # rows and columns of the matrices
LOOK = "look at nvidia-smi, rocm-smi or xpu-smi"


def check_torch(outdir: Path, timeout: float) -> Iterator[Finding]:
    """Import torch, and look at its version."""
    begin = time.monotonic()
    # A broken build may raise anything, also SystemExit.
    try:
        import torch
    except BaseException as error:
        seen = f"import torch: {type(error).__name__}: {error}"
        yield Finding("torch", "fail", seen, _import_fix(error))
        return
    from mmm.runtime.device import too_old
    from mmm.torch_private.faults import FAULTS

    seconds = time.monotonic() - begin
    where = os.path.dirname(torch.__file__ or "")
    build = accelerators.torch_build()
    seen = f"{torch.__version__}, built for {build}, imported in {seconds:.1f} s from {where}"
    yield Finding("torch", "fail" if too_old() else "ok", seen, too_old())
    # The probes are of PyTorch from the oldest that mmm takes on.
    if too_old():
        return
    for fault in FAULTS:
        if not fault.works():
            yield Finding("torch", "warn", f"cannot do {fault.what}: {fault.reason}", fault.instead)


def check_devices(outdir: Path, timeout: float) -> Iterator[Finding]:
    """Are there as many devices as `launch` counts, and does each multiply matrices right?"""
    yield check_matmul("cpu")
    # By the files of the drivers, without torch.
    finding, devices = compare(accelerators.find())
    yield finding
    for device in devices:
        yield check_matmul(device)


def compare(counted: accelerators.Accelerators) -> tuple[Finding, list[str]]:
    """Compare what torch sees with what `launch` has counted. Also returns the names of the devices."""
    import torch

    from mmm.runtime.device import is_available

    for kind in ("cuda", "xpu", "mps"):
        if not is_available(kind):
            continue
        # There is one mps, and it has no index.
        devices = [kind]
        seen = kind
        if kind != "mps":
            module = getattr(torch, kind)
            devices = [f"{kind}:{index}" for index in range(module.device_count())]
            seen = f"{len(devices)} {kind}: {module.get_device_name(0)}"
        if counted.device == kind and counted.count == len(devices):
            return Finding("devices", "ok", seen), devices
        seen = f"torch sees {seen}; launch counts {counted.count} ({counted.why})"
        fix = f"say how many ranks there are to be: launch -n {len(devices)}"
        return Finding("devices", "warn", seen, fix), devices
    if not counted.count:
        return Finding("devices", "ok", f"no accelerator: {counted.why}"), []
    seen = f"the machine has {counted.count} {counted.device} ({counted.why}), but torch sees none"
    fix = f"the driver does not go with this torch, or they are hidden: {LOOK}"
    return Finding("devices", "fail", seen, fix), []


def check_matmul(device: str, multiply: Callable[[Any, Any], Any] | None = None) -> Finding:
    """Compare a product of small whole numbers, which float32 (and TF32) holds exactly, with whole numbers.

    Args:
        multiply: replaces `torch.matmul`.
    """
    import torch

    multiply = multiply or torch.matmul
    left, right = torch.randint(-4, 5, (2, SIZE, SIZE), generator=torch.Generator().manual_seed(0))
    # In whole numbers on the CPU torch runs plain loops, not a library's kernel.
    expected = left @ right
    product = multiply(left.to(device, torch.float32), right.to(device, torch.float32))
    # Exactly: all sums are whole numbers of at most 16 · SIZE.
    wrong = int((product.cpu() != expected).sum())
    if not wrong:
        return Finding(f"matmul {device}", "ok", f"right: all elements of a {SIZE} × {SIZE} product")
    fix = "do not compute on this device: ask for it to be reset, or leave it out of the run"
    if device == "cpu":
        fix = f"do not compute on it: {REINSTALL}"
    return Finding(f"matmul {device}", "fail", f"{wrong:,} of {SIZE * SIZE:,} elements of a product are wrong", fix)


def _import_fix(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "pip install torch (docs/install.md: which build), in the environment that runs this"
    if os.environ.get("TORCH_LOGS") == "":
        return "unset TORCH_LOGS: torch does not import where it is set to nothing"
    return REINSTALL
