"""The one place that imports torchvision.

Its wheels carry a compiled part for one build of torch. Beside another build (a CPU-only torch, a site's own) that part
does not load, and ``import torchvision`` ends in ``RuntimeError: operator torchvision::nms does not exist``, although
data sets and transforms do not need it. Two declared operators let the import through; they are withdrawn after it.
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
from mmm.torch_private.operators import has_kernel

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")  # torchvision's import registers fake and autocast versions of these


def import_torchvision(part: str) -> ModuleType:
    """A part of torchvision such as ``datasets``, whether or not its compiled operators load here.

    Raises:
        DataError: torchvision is not installed, or does not import for another reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its image decoder and the operators that are missing
            # The declaration lasts as long as this reference.
            declared = _declare_missing_operators() if "torchvision" not in sys.modules else None
            module = importlib.import_module(f"torchvision.{part}")
            del declared
            return module
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


def _declare_missing_operators() -> torch.library.Library | None:
    """Declare the operators that the import looks for; None where the real ones load, as in ``extension.py``."""
    spec = importlib.util.find_spec("torchvision")
    for folder in map(Path, spec.submodule_search_locations or [] if spec else []):
        for compiled in sorted([*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]):  # _C_stable from 0.29 on
            try:
                torch.ops.load_library(os.fspath(compiled))  # a second time it does nothing
                return None
            except OSError:
                continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not has_kernel(f"torchvision::{name}"):
            library.define(name + _SCHEMA)
    return library
