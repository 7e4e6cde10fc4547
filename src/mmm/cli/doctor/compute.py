"""torch, its devices and their arithmetic, and a collective between two ranks. Each function is called in a child."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from mmm.cli.doctor.finding import Finding, Place
from mmm.cli.doctor.isolated import isolated, shown
from mmm.launch.plan import accelerators
from mmm.processes import fork_ranks
from mmm.runtime.peaks import named_peak
from mmm.runtime.ranks import Rank

OLDEST = (2, 11)
SLOW_IMPORT = 30.0  # s
SIZE = 256
BUILDS = {"cpu": "CPU", "cuda": "CUDA", "hip": "ROCm", "xpu": "Intel GPUs"}
MEET = "two ranks on this host cannot meet: see `host name` and `interfaces`; try export GLOO_SOCKET_IFNAME=lo"
REINSTALL = "reinstall torch for this Python and machine (docs/install.md)"


def check_torch(place: Place) -> Iterator[Finding]:
    """Import torch; then, where a process that has imported it may be forked, all that needs it."""
    begin = time.monotonic()
    try:
        import torch
    except BaseException as error:
        yield Finding("torch", "fail", f"import torch: {shown(error)}", _import_fix(place, error))
        yield Finding("matmul", "fail", "not tried: torch cannot be imported")
        yield Finding("all-reduce", "fail", "not tried: torch cannot be imported")
        return
    seconds = time.monotonic() - begin
    build = accelerators.torch_build()
    where = os.path.dirname(torch.__file__ or "")
    seen = f"{torch.__version__}, built for {BUILDS.get(build, build)}, imported in {seconds:.1f} s from {where}"
    numbers = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if numbers < OLDEST:
        yield Finding("torch", "fail", seen, f"mmm needs torch {'.'.join(map(str, OLDEST))} or newer")
    elif seconds > SLOW_IMPORT:
        yield Finding(
            "torch",
            "warn",
            seen,
            "a slow file system: copy the environment to node-local disk; `launch` imports once a host",
        )
    else:
        yield Finding("torch", "ok", seen)
    if build != "xpu":  # an Intel GPU's driver does not survive a fork
        yield from check_devices(place)
        yield from check_all_reduce(place)


def check_devices(place: Place) -> Iterator[Finding]:
    """For each device that torch sees: does it multiply matrices right? And does `launch` count the same ones?"""
    yield from isolated("matmul cpu", lambda: matmul("cpu", 0), place.timeout, REINSTALL)
    found = accelerators.find(place.root, place.environ)
    counted = isolated(
        "accelerators",
        lambda: _count(found),
        place.timeout,
        "the driver hangs: look at nvidia-smi, rocm-smi or xpu-smi, and at dmesg",
    )
    yield from (each for each in counted if each.name != "count")
    for each in counted:
        if each.name == "count":
            kind, index = each.seen.split(":")
            reset = f"device {index} hangs or computes wrongly: ask for it to be reset, or leave it out of the run"
            yield from isolated(
                f"matmul {kind}:{index}",
                lambda k=kind, i=int(index): matmul(k, i),  # type: ignore[misc]
                place.timeout,
                reset,
            )


def _count(found: accelerators.Accelerators) -> Iterator[Finding]:
    """A finding on what torch sees beside what `launch` has counted; then one called "count" for each device."""
    import torch

    from mmm.runtime.device import is_available

    for kind in ("cuda", "xpu", "mps"):
        if not is_available(kind):
            continue
        count = 1 if kind == "mps" else getattr(torch, kind).device_count()
        names = "" if kind == "mps" else f": {_with_peak(getattr(torch, kind).get_device_name(0))}"
        if found.device == kind and found.count == count:
            yield Finding("accelerators", "ok", f"{count} {kind}{names}")
        else:
            yield Finding(
                "accelerators",
                "warn",
                f"torch sees {count} {kind}{names}; launch counts {found.count} ({found.why})",
                f"say how many ranks there are to be: launch -n {count}",
            )
        for index in range(count):
            yield Finding("count", "ok", f"{kind}:{index}")
        return
    if found.count:
        yield Finding(
            "accelerators",
            "fail",
            f"the machine has {found.count} {found.device} ({found.why}), but torch sees none",
            "the driver does not go with this torch, or the devices are hidden: look at "
            "nvidia-smi, rocm-smi or xpu-smi",
        )
    else:
        yield Finding("accelerators", "ok", f"none: {found.why}")


def _with_peak(name: str) -> str:
    """A device's name, and the peak by which `mfu` is counted."""
    peak = named_peak(name, "bf16")
    return f"{name}, {peak / 1e12:,.0f} TFLOP/s in bf16" if peak else f"{name}, whose peak is not known"


def matmul(kind: str, index: int, multiply: Callable[[Any, Any], Any] | None = None) -> Iterator[Finding]:
    """Two matrices of small whole numbers, whose product float32 (and TF32) holds exactly, against whole numbers.

    Args:
        multiply: instead of torch's.
    """
    import torch

    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (SIZE, SIZE), generator=numbers) for _ in range(2))
    right = a @ b  # in whole numbers, on the CPU: plain loops, no library's kernel
    device = torch.device(kind, index) if kind in ("cuda", "xpu") else torch.device(kind)
    begin = time.monotonic()
    product = (multiply or torch.matmul)(a.to(device, torch.float32), b.to(device, torch.float32)).cpu()
    seconds = time.monotonic() - begin
    wrong = int((product.to(torch.int64) != right).sum())
    name = f"matmul {kind}" if kind in ("cpu", "mps") else f"matmul {kind}:{index}"
    if wrong:
        yield Finding(
            name,
            "fail",
            f"{wrong:,} of {SIZE * SIZE:,} elements of a product are wrong",
            "do not compute on it: " + (REINSTALL if kind == "cpu" else "report the device"),
        )
    else:
        yield Finding(name, "ok", f"right: all {SIZE * SIZE:,} elements of a {SIZE} × {SIZE} product, {seconds:.2f} s")


def check_all_reduce(place: Place) -> Iterator[Finding]:
    """An all-reduce between two ranks on this host: on the CPU, and on two accelerators where there are as many."""
    found = accelerators.find(place.root, place.environ)
    kinds = ["cpu", *([found.device] if found.device in ("cuda", "xpu") and found.count > 1 else [])]
    for kind in kinds:
        name = f"all-reduce {kind}"
        fix = MEET if kind == "cpu" else "see what NCCL_DEBUG=INFO says; on the CPU alone: --device cpu"
        yield from isolated(name, lambda k=kind, n=name: _two_ranks(k, n, place.timeout), place.timeout, fix)  # type: ignore[misc]
    if found.device in ("cuda", "xpu") and found.count == 1:
        yield Finding(f"all-reduce {found.device}", "ok", "not tried: there is one device, and two ranks need two")


def _two_ranks(kind: str, name: str, timeout: float) -> Iterator[Finding]:
    """Two forked ranks add up 1 and 2."""
    (total, backend, seconds), _ = fork_ranks(_all_reduce, 2, kind, timeout, timeout=timeout)
    if total == 3:
        yield Finding(name, "ok", f"{backend}: right, 2 ranks, {seconds:.2f} s from start to result")
    else:
        yield Finding(name, "fail", f"{backend}: 1 + 2 is {total:g}", "do not train here: report it")


def _all_reduce(rank: Rank, kind: str, timeout: float) -> tuple[float, str, float]:
    """The sum over both ranks of 1 + rank, the backend, and the seconds it took. A collective."""
    import torch
    import torch.distributed as dist

    from mmm.runtime.device import backend_for
    from mmm.runtime.process_group import process_group

    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank.rank)
    if kind != "cpu":
        getattr(torch, kind).set_device(device)
    begin = time.monotonic()
    with process_group(rank, device, timeout):
        total = torch.ones((), device=device) * (1 + rank.rank)
        dist.all_reduce(total)
        result = float(total)
    return result, backend_for(device), time.monotonic() - begin


def _import_fix(place: Place, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "pip install torch (docs/install.md: which build), in the environment that runs this"
    if place.environ.get("TORCH_LOGS") == "":
        return "unset TORCH_LOGS: torch does not import where it is set to nothing"
    return REINSTALL
