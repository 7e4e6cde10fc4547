"""Count this host's accelerators without importing torch.

Two things must agree: what the installed torch was built for (its version.py, read as text) and what the machine has
(device files). Every path is below `root`, so a made-up tree can stand in for a machine.
"""

import ast
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INTEL = "0x8086"
INTEL_DATA_CENTRE = "0x038000"  # PCI class of GPUs without a display output


@dataclass(frozen=True)
class Accelerators:
    """`count` devices of torch's type `device`, which is None where there are none. `why` says it in words."""

    device: str | None
    count: int
    why: str


def find(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, build: str | None = None, system: str | None = None
) -> Accelerators:
    """What the installed torch could use on this host. `build` and `system` stand in for torch's and the host's own."""
    build = torch_build() if build is None else build
    system = system or f"{platform.system()} {platform.machine()}"
    if build == "none":
        return Accelerators(None, 0, "torch is not installed")
    if build == "cuda":
        count = _visible(_nvidia(root), environ, "CUDA_VISIBLE_DEVICES")
        return _found("cuda", count, "NVIDIA GPU", environ, "CUDA_VISIBLE_DEVICES")
    if build == "hip":
        count = _visible(_amd(root), environ, "ROCR_VISIBLE_DEVICES")
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            count = _visible(count, environ, name)
        return _found(
            "cuda", count, "AMD GPU", environ, "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
        )
    if build == "xpu":
        return _found(
            "xpu", _intel(root, environ), "Intel GPU tile", environ, "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"
        )
    if system == "Darwin arm64":
        return Accelerators(None, 0, "an Apple GPU computes where --device mps says so")
    return Accelerators(None, 0, "torch is built for CPU")


def torch_build() -> str:
    """ "cuda", "hip", "xpu", "cpu", or "none" without torch: from torch/version.py, which is read and not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "none"
    for folder in spec.submodule_search_locations:
        try:
            return read_build((Path(folder) / "version.py").read_text())
        except OSError:
            continue
    return "cpu"


def read_build(text: str) -> str:
    """The build in the text of a torch/version.py: the one of `hip`, `xpu`, `cuda` that is not None, else "cpu"."""
    values = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant):
            name = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            values[ast.unparse(name)] = node.value.value
    return next((name for name in ("hip", "xpu", "cuda") if values.get(name)), "cpu")


def _found(device: str, count: int, what: str, environ: Mapping[str, str], *names: str) -> Accelerators:
    by = ", ".join(f"{n}={environ[n]}" for n in names if n in environ)
    why = f"{count} {what}{'' if count == 1 else 's'}{f' ({by})' if by else ''}"
    return Accelerators(device if count else None, count, why)


def _nvidia(root: Path) -> int:
    count = sum(1 for path in _list(root / "dev") if re.fullmatch(r"nvidia\d+", path.name))
    if not count and (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return 1  # Windows Subsystem for Linux shows one file for all GPUs
    return count


def _amd(root: Path) -> int:
    """Nodes of the kernel's topology that have SIMD units; a node closed to us cannot be read, and is not ours."""
    count = 0
    for node in _list(root / "sys/class/kfd/kfd/topology/nodes"):
        match = re.search(r"^simd_count\s+(\d+)", _text(node / "properties"), re.MULTILINE)
        count += bool(match and int(match[1]) > 0)
    return count


def _intel(root: Path, environ: Mapping[str, str]) -> int:
    """Level Zero devices: each tile is one, unless ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE makes each card one."""
    tiles = []
    for card in _list(root / "sys/class/drm"):
        device = card / "device"
        if (
            re.fullmatch(r"card\d+", card.name)
            and _text(device / "vendor").strip() == INTEL
            and _text(device / "class").strip() == INTEL_DATA_CENTRE
        ):
            xe = [p for p in _list(device) if re.fullmatch(r"tile\d+", p.name)]  # the xe driver
            i915 = [p for p in _list(card / "gt") if re.fullmatch(r"gt\d+", p.name)]  # the i915 driver
            tiles.append(max(1, len(xe or i915)))
    composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"
    count = len(tiles) if composite else sum(tiles)
    mask = environ.get("ZE_AFFINITY_MASK", "").strip()
    if not mask:
        return count
    entries = {entry.strip().partition(".")[0] if composite else entry.strip() for entry in mask.split(",")}
    return sum(1 for e in entries if (n := e.partition(".")[0]).isdigit() and int(n) < count)


def _visible(count: int, environ: Mapping[str, str], name: str) -> int:
    """How many of `count` devices the list in variable `name` leaves. The list ends at its first entry that is none."""
    if name not in environ:
        return count
    kept: set[str] = set()
    for entry in environ[name].split(","):
        entry = entry.strip()
        uuid = entry[:4].upper() in ("GPU-", "MIG-")
        if not uuid and not (entry.isdigit() and int(entry) < count):
            break
        kept.add(entry)
    # Of MIG devices CUDA shows a process one, however many are listed.
    return min(count, len(kept)) if not any(e[:4].upper() == "MIG-" for e in kept) else 1


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
