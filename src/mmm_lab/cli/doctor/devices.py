"""torch and its devices: does it import, which devices are there, and do they compute?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mmm_lab.cli.doctor.collectives import check_collectives
from mmm_lab.cli.doctor.finding import Finding, Place
from mmm_lab.cli.doctor.isolated import isolated, shown
from mmm_launch.spec import accelerators

SIZE = 256  # rows and columns of the matrices
REINSTALL = "reinstall torch for this Python and machine (docs/install.md)"
LOOK = "look at nvidia-smi, rocm-smi or xpu-smi"


def check_torch(place: Place) -> Iterator[Finding]:
    """Import torch; then, where a process that has imported it may be forked, all that needs it."""
    begin = time.monotonic()
    # A broken build may raise anything, also SystemExit.
    try:
        import torch
    except BaseException as error:
        yield Finding("torch", "fail", f"import torch: {shown(error)}", _import_fix(place, error))
        for name in ("devices", "collectives"):
            yield Finding(name, "fail", "not tried: torch cannot be imported")
        return
    seconds = time.monotonic() - begin
    build = accelerators.torch_build()
    where = os.path.dirname(torch.__file__ or "")
    seen = f"{torch.__version__}, built for {build}, imported in {seconds:.1f} s from {where}"
    from mmm.runtime.device import too_old

    if too_old():
        yield Finding("torch", "fail", seen, too_old())
    else:
        yield Finding("torch", "ok", seen)
    # An Intel GPU's driver does not survive a fork: `checks.examine` makes these then.
    if build != "xpu":
        yield from check_devices(place)
        yield from check_collectives(place)


def check_devices(place: Place) -> Iterator[Finding]:
    """Are there as many devices as `launch` counts, and does each multiply matrices right?"""
    # By the files of the drivers, without torch.
    counted = accelerators.find(place.root, place.environ)
    fix = f"the driver hangs: {LOOK}, and at dmesg"
    devices = ["cpu"]
    for finding in isolated("devices", partial(_count, counted), place.timeout, fix):
        # The child process names each device by such a finding.
        if finding.name == "device":
            devices.append(finding.seen)
        else:
            yield finding
    for device in devices:
        yield from isolated(f"matmul {device}", partial(check_matmul, device), place.timeout, _broken(device))


def _count(counted: accelerators.Accelerators) -> Iterator[Finding]:
    """Compare what torch sees with what `launch` has counted. Then yields a finding called "device" for each device."""
    import torch

    from mmm.runtime.device import is_available

    for kind in ("cuda", "xpu", "mps"):
        if not is_available(kind):
            continue
        module = getattr(torch, kind)
        count = 1
        seen = kind
        if kind != "mps":
            count = module.device_count()
            seen = f"{count} {kind}: {module.get_device_name(0)}"
        if counted.device == kind and counted.count == count:
            yield Finding("devices", "ok", seen)
        else:
            seen = f"torch sees {seen}; launch counts {counted.count} ({counted.why})"
            yield Finding("devices", "warn", seen, f"say how many ranks there are to be: launch -n {count}")
        for index in range(count):
            # There is one mps, and it has no index.
            name = kind if kind == "mps" else f"{kind}:{index}"
            yield Finding("device", "ok", name)
        return
    if counted.count:
        seen = f"the machine has {counted.count} {counted.device} ({counted.why}), but torch sees none"
        yield Finding("devices", "fail", seen, f"the driver does not go with this torch, or they are hidden: {LOOK}")
    else:
        yield Finding("devices", "ok", f"no accelerator: {counted.why}")


def check_matmul(device: str, multiply: Callable[[Any, Any], Any] | None = None) -> Iterator[Finding]:
    """Compare a product of small whole numbers, which float32 (and TF32) holds exactly, with whole numbers.

    Args:
        multiply: replaces `torch.matmul`.
    """
    import torch

    multiply = multiply or torch.matmul
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-4, 5, (SIZE, SIZE), generator=generator)
    right = torch.randint(-4, 5, (SIZE, SIZE), generator=generator)
    # In whole numbers on the CPU torch runs plain loops, not a library's kernel.
    expected = left @ right
    left = left.to(device, torch.float32)
    right = right.to(device, torch.float32)
    product = multiply(left, right).cpu()
    # Exactly: all sums are whole numbers of at most 16 · SIZE.
    wrong = int((product.to(torch.int64) != expected).sum())
    elements = SIZE * SIZE
    if wrong:
        seen = f"{wrong:,} of {elements:,} elements of a product are wrong"
        yield Finding(f"matmul {device}", "fail", seen, _broken(device))
    else:
        seen = f"right: all {elements:,} elements of a {SIZE} × {SIZE} product"
        yield Finding(f"matmul {device}", "ok", seen)


def _broken(device: str) -> str:
    if device == "cpu":
        return f"do not compute on it: {REINSTALL}"
    return "it hangs or computes wrongly: ask for it to be reset, or leave it out of the run"


def _import_fix(place: Place, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "pip install torch (docs/install.md: which build), in the environment that runs this"
    if place.environ.get("TORCH_LOGS") == "":
        return "unset TORCH_LOGS: torch does not import where it is set to nothing"
    return REINSTALL
