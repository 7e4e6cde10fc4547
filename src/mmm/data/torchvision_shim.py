"""The one place that imports torchvision.

Its wheels carry a compiled part for one build of torch. Beside another build (a CPU-only torch, a site's own) that part
does not load, and ``import torchvision`` ends in ``RuntimeError: operator torchvision::nms does not exist``, though
data sets and transforms need nothing of it. Declaring the two operators that the import looks for lets it through; they
stay without an implementation, so calling one still fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from mmm.errors import DataError

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")  # torchvision's import registers fake and autocast versions of these
_declared: list[torch.library.Library] = []  # a declaration lives as long as this reference


def import_torchvision(part: str = "") -> ModuleType:
    """torchvision, or a part of it such as ``datasets``, whether or not its compiled operators load here.

    Raises:
        DataError: torchvision is not installed, or does not import for another reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its image decoder and the operators that are missing
            if "torchvision" not in sys.modules:
                _declare_missing_operators()
            return importlib.import_module(f"torchvision.{part}" if part else "torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise DataError("torchvision is not installed, and this data needs it: pip install torchvision") from None
    except (ImportError, RuntimeError, OSError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise DataError(
            f"torchvision does not import beside torch {torch.__version__} ({reason}): install the release "
            f"made for this torch"
        ) from error


def _declare_missing_operators() -> None:
    """Declare what the import looks for, unless the real operators load."""
    if _declared or _real_operators_load():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not torch._C._dispatch_has_kernel(f"torchvision::{name}"):
            library.define(name + _SCHEMA)
    _declared.append(library)


def _real_operators_load() -> bool:
    """Try as ``torchvision/extension.py`` does: load its ``_C`` library. Loading it a second time does nothing."""
    spec = importlib.util.find_spec("torchvision")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in map(Path, folders):
        for library in sorted([*folder.glob("_C.*so"), *folder.glob("_C.so"), *folder.glob("_C*.pyd")]):
            try:
                torch.ops.load_library(os.fspath(library))
                return True
            except OSError:
                continue
    return False
