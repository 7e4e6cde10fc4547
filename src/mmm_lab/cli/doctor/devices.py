"""torch and its devices: does it import, which devices are there, and do they compute?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from mmm_lab.cli.doctor.collectives import check_collectives
from mmm_lab.cli.doctor.finding import Finding, Place
from mmm_lab.cli.doctor.isolated import isolated, shown
from mmm_launch.spec import accelerators

OLDEST = (2, 11)
SIZE = 256  # rows and columns of the matrices
REINSTALL = "reinstall torch for this Python and machine (docs/install.md)"
LOOK = "look at nvidia-smi, rocm-smi or xpu-smi"


def check_torch(place: Place) -> Iterator[Finding]:
    """Import torch; then, where a process that has imported it may be forked, all that needs it."""
    begin = time.monotonic()
    try:
        import torch
    except BaseException as error:
        yield Finding("torch", "fail", f"import torch: {shown(error)}", _import_fix(place, error))
        yield Finding("devices", "fail", "not tried: torch cannot be imported")
        yield Finding("collectives", "fail", "not tried: torch cannot be imported")
        return
    seconds = time.monotonic() - begin
    build = accelerators.torch_build()
    where = os.path.dirname(torch.__file__ or "")
    seen = f"{torch.__version__}, built for {build}, imported in {seconds:.1f} s from {where}"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        yield Finding("torch", "fail", seen, f"mmm needs torch {'.'.join(map(str, OLDEST))} or newer")
    else:
        yield Finding("torch", "ok", seen)
    if build != "xpu":  # an Intel GPU's driver does not survive a fork
        yield from check_devices(place)
        yield from check_collectives(place)


def check_devices(place: Place) -> Iterator[Finding]:
    """Are there as many devices as `launch` counts, and does each multiply matrices right?"""
    found = accelerators.find(place.root, place.environ)
    findings = isolated("devices", lambda: _count(found), place.timeout, f"the driver hangs: {LOOK}, and at dmesg")
    devices = ["cpu"]
    for finding in findings:
        if finding.name == "device":  # `_count` names each for us
            devices.append(finding.seen)
        else:
            yield finding
    for device in devices:

        def check(device: str = device) -> Iterator[Finding]:
            return check_matmul(device)

        yield from isolated(f"matmul {device}", check, place.timeout, _broken(device))


def _count(found: accelerators.Accelerators) -> Iterator[Finding]:
    """A finding on what torch sees beside what `launch` has counted; then one called "device" for each."""
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
        if found.device == kind and found.count == count:
            yield Finding("devices", "ok", seen)
        else:
            seen = f"torch sees {seen}; launch counts {found.count} ({found.why})"
            yield Finding("devices", "warn", seen, f"say how many ranks there are to be: launch -n {count}")
        for index in range(count):
            yield Finding("device", "ok", kind if kind == "mps" else f"{kind}:{index}")
        return
    if found.count:
        seen = f"the machine has {found.count} {found.device} ({found.why}), but torch sees none"
        yield Finding("devices", "fail", seen, f"the driver does not go with this torch, or they are hidden: {LOOK}")
    else:
        yield Finding("devices", "ok", f"no accelerator: {found.why}")


def check_matmul(device: str, multiply: Callable[[Any, Any], Any] | None = None) -> Iterator[Finding]:
    """Compare a product of small whole numbers, which float32 (and TF32) holds exactly, with whole numbers.

    Args:
        multiply: instead of torch's.
    """
    import torch

    multiply = multiply or torch.matmul
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-4, 5, (SIZE, SIZE), generator=generator)
    right = torch.randint(-4, 5, (SIZE, SIZE), generator=generator)
    expected = left @ right  # in whole numbers, on the CPU: plain loops, no library's kernel
    product = multiply(left.to(device, torch.float32), right.to(device, torch.float32)).cpu()
    wrong = int((product.to(torch.int64) != expected).sum())
    if wrong:
        seen = f"{wrong:,} of {SIZE * SIZE:,} elements of a product are wrong"
        yield Finding(f"matmul {device}", "fail", seen, _broken(device))
    else:
        yield Finding(f"matmul {device}", "ok", f"right: all {SIZE * SIZE:,} elements of a {SIZE} × {SIZE} product")


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
