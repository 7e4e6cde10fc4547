"""Counts this host's accelerators without importing torch, which would take seconds.

Two things have to agree: what the installed torch was built for (its version.py, read as text) and what the host has
(device files). Every path is below `root`, so that a test can make up a host.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INTEL = "0x8086"
# PCI class of GPUs without a display output.
INTEL_DATA_CENTRE = "0x038000"


@dataclass(frozen=True)
class Accelerators:
    """The accelerators of a host.

    Attributes:
        device: torch's type of device. None: there are none.
        count: number of devices.
        why: what was found, in words.
    """

    device: str | None
    count: int
    why: str


def find(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, build: str | None = None) -> Accelerators:
    """Find the accelerators that the installed torch can use on this host.

    Args:
        root: root of the file system.
        environ: environment; a variable such as CUDA_VISIBLE_DEVICES may hide devices.
        build: what torch was built for. Default: read from its files.
    """
    if build is None:
        build = torch_build()
    if build == "cuda":
        return _found("cuda", _nvidia(root), "NVIDIA GPU", environ, "CUDA_VISIBLE_DEVICES")
    if build == "hip":
        names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return _found("cuda", _amd(root), "AMD GPU", environ, *names)
    if build == "xpu":
        return _found("xpu", _intel(root, environ), "Intel GPU tile", environ, "ZE_AFFINITY_MASK")
    if build == "none":
        return Accelerators(None, 0, "torch is not installed")
    return Accelerators(None, 0, "torch is built for CPU")


def torch_build() -> str:
    """Read from torch/version.py, as text, what torch was built for: cuda, hip, xpu or cpu; none without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "none"
    return read_build(_text(Path(spec.submodule_search_locations[0]) / "version.py"))


def read_build(text: str) -> str:
    """Return which of `hip`, `xpu` and `cuda` has a version in the text of a torch/version.py; else "cpu"."""
    for name in ("hip", "xpu", "cuda"):
        if re.search(rf"^{name}\b[^=\n]*= *['\"]", text, re.MULTILINE):
            return name
    return "cpu"


def _found(device: str, count: int, noun: str, environ: Mapping[str, str], *names: str) -> Accelerators:
    """Count the devices that the lists in the variables `names` leave of `count` devices."""
    lists = [f"{name}={environ[name]}" for name in names if name in environ]
    for name in names:
        if name in environ:
            count = _visible(count, environ[name])
    why = f"{count} {noun}"
    if count != 1:
        why += "s"
    if lists:
        why += f" ({', '.join(lists)})"
    if not count:
        return Accelerators(None, 0, why)
    return Accelerators(device, count, why)


def _nvidia(root: Path) -> int:
    return sum(1 for path in _list(root / "dev") if re.fullmatch(r"nvidia\d+", path.name))


def _amd(root: Path) -> int:
    """Count the nodes of the kernel's topology that have SIMD units: CPUs are nodes too, and have none."""
    # A container may use some GPUs only. The files of the others cannot be read.
    count = 0
    for node in _list(root / "sys/class/kfd/kfd/topology/nodes"):
        match = re.search(r"^simd_count\s+(\d+)", _text(node / "properties"), re.MULTILINE)
        count += bool(match and int(match[1]) > 0)
    return count


def _intel(root: Path, environ: Mapping[str, str]) -> int:
    """Count Level Zero devices: each tile is one, unless ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE makes each card one."""
    tiles = []
    for card in _list(root / "sys/class/drm"):
        device = card / "device"
        if (
            re.fullmatch(r"card\d+", card.name)
            and _text(device / "vendor").strip() == INTEL
            and _text(device / "class").strip() == INTEL_DATA_CENTRE
        ):
            # Intel's two kernel drivers, xe and i915, list a card's tiles in different folders.
            xe_tiles = [path for path in _list(device) if re.fullmatch(r"tile\d+", path.name)]
            i915_tiles = [path for path in _list(card / "gt") if re.fullmatch(r"gt\d+", path.name)]
            tiles.append(max(1, len(xe_tiles or i915_tiles)))
    composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"
    if composite:
        return len(tiles)
    return sum(tiles)


def _visible(count: int, text: str) -> int:
    """Count the devices that a list such as `0,2` leaves of `count` devices.

    As in CUDA, the list ends at its first entry that is not a device. An entry may be a UUID (GPU-…), or one tile of
    a card (0.1).
    """
    visible: set[str] = set()
    for entry in text.split(","):
        name = entry.strip().partition(".")[0]
        # CUDA shows a process only one MIG device, however many are listed.
        if name.startswith("MIG-"):
            return 1
        if not name.startswith("GPU-") and not (name.isdigit() and int(name) < count):
            break
        visible.add(name)
    return len(visible)


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
