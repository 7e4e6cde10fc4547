"""Count this host's accelerators without importing torch.

Two things must agree: what the installed torch was built for (its version.py, read as text) and what the machine has
(device files). Every path is below `root`, so a made-up tree can stand in for a machine.
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
    """`count` devices of torch's type `device`, which is None where there are none. `why` says it in words."""

    device: str | None
    count: int
    why: str


def find(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, build: str | None = None) -> Accelerators:
    """What the installed torch could use on this host. `build` stands in for torch's own."""
    build = torch_build() if build is None else build
    if build == "cuda":
        return _found("cuda", _nvidia(root), "NVIDIA GPU", environ, "CUDA_VISIBLE_DEVICES")
    if build == "hip":
        names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return _found("cuda", _amd(root), "AMD GPU", environ, *names)
    if build == "xpu":
        return _found("xpu", _intel(root, environ), "Intel GPU tile", environ, "ZE_AFFINITY_MASK")
    return Accelerators(None, 0, "torch is not installed" if build == "none" else "torch is built for CPU")


def torch_build() -> str:
    """ "cuda", "hip", "xpu", "cpu", or "none" without torch: from torch/version.py, which is read and not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "none"
    return read_build(_text(Path(spec.submodule_search_locations[0]) / "version.py"))


def read_build(text: str) -> str:
    """The build in the text of a torch/version.py: the one of `hip`, `xpu`, `cuda` that has a version, else "cpu"."""
    for name in ("hip", "xpu", "cuda"):
        if re.search(rf"^{name}\b[^=\n]*= *['\"]", text, re.MULTILINE):
            return name
    return "cpu"


def _found(device: str, count: int, what: str, environ: Mapping[str, str], *names: str) -> Accelerators:
    """What the lists in the variables `names` leave of `count` devices."""
    lists = [f"{name}={environ[name]}" for name in names if name in environ]
    for name in names:
        if name in environ:
            count = _visible(count, environ[name])
    why = f"{count} {what}{'' if count == 1 else 's'}"
    if lists:
        why += f" ({', '.join(lists)})"
    return Accelerators(device if count else None, count, why)


def _nvidia(root: Path) -> int:
    return sum(1 for path in _list(root / "dev") if re.fullmatch(r"nvidia\d+", path.name))


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
            # Intel's two kernel drivers list a card's tiles in different folders: xe, and i915.
            xe = [p for p in _list(device) if re.fullmatch(r"tile\d+", p.name)]
            i915 = [p for p in _list(card / "gt") if re.fullmatch(r"gt\d+", p.name)]
            tiles.append(max(1, len(xe or i915)))
    composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"
    return len(tiles) if composite else sum(tiles)


def _visible(count: int, text: str) -> int:
    """How many of `count` devices a list such as `0,2` leaves. The list ends at its first entry that is none.

    A device may be called by its UUID, and a card's tile is `0.1`. Of MIG devices CUDA shows a process one.
    """
    kept: set[str] = set()
    for entry in text.split(","):
        name = entry.strip().partition(".")[0]
        if name.startswith("MIG-"):
            return 1
        if not name.startswith("GPU-") and not (name.isdigit() and int(name) < count):
            break
        kept.add(name)
    return len(kept)


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
