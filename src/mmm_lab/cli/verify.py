"""``mmm verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

from types import ModuleType

from mmm_verify.command import main as verify


def main(argv: list[str]) -> int:
    """Run the command of `mmm_verify`, with a torchvision whose compiled part may be missing."""
    return verify(argv, "mmm verify", _import_torchvision)


def _import_torchvision(module: str) -> ModuleType:
    from mmm.data.images.torchvision_shim import import_torchvision  # imports torch

    return import_torchvision(module)
