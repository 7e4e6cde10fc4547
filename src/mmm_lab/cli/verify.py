"""``mmm verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

from types import ModuleType

from mmm_verify.command import main as verify


def main(argv: list[str]) -> int:
    """The command of `mmm_verify`, beside a torchvision whose compiled part may not load."""
    return verify(argv, "mmm verify", _import_torchvision)


def _import_torchvision(part: str) -> ModuleType:
    from mmm.data.images.torchvision_shim import import_torchvision  # imports torch

    return import_torchvision(part)
