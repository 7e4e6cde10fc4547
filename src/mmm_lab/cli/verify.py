"""``mmm verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from mmm_verify.command import main as verify

if TYPE_CHECKING:
    from mmm_verify.subject import Subject


def main(argv: list[str]) -> int:
    """Run the command of `mmm_verify`, with a torchvision whose compiled part may be missing, and with --space."""
    return verify(argv, "mmm verify", _import_torchvision, _split_space)


def _import_torchvision(module: str) -> ModuleType:
    from mmm.data.images.torchvision_shim import import_torchvision  # imports torch

    return import_torchvision(module)


def _split_space(subject: Subject, space: str, timeout: float) -> Subject:
    from mmm_lab.parity.space import split_subject  # imports torch

    return split_subject(subject, space, timeout)
