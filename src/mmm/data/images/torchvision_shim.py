"""The one place that imports torchvision.

Its wheels carry compiled operators for one build of torch. Next to another build (a CPU-only torch, a site's own) they
do not load, and ``import torchvision`` ends in ``RuntimeError: operator torchvision::nms does not exist``, although
data sets and transforms do not need that operator. Declaring two operators lets the import succeed; the declarations
are withdrawn after it.
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
# torchvision's import registers fake and autocast versions of these.
_OPERATORS = ("nms", "qnms")


def import_torchvision(submodule: str) -> ModuleType:
    """Import a submodule of torchvision such as ``datasets``, whether or not its compiled operators load here.

    Raises:
        DataError: torchvision is not installed, or its import fails for another reason.
    """
    try:
        with warnings.catch_warnings():
            # It warns about its image decoder and the operators that are missing.
            warnings.simplefilter("ignore")
            declared = None
            if "torchvision" not in sys.modules:
                declared = _declare_missing_operators()
            module = importlib.import_module(f"torchvision.{submodule}")
            # The declarations last as long as this reference.
            del declared
            return module
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise DataError("torchvision is not installed, and this data needs it: pip install torchvision") from None
    except (ImportError, RuntimeError, OSError) as error:
        text = str(error).strip() or repr(error)
        last_line = text.splitlines()[-1]
        raise DataError(
            f"torchvision cannot be imported next to torch {torch.__version__} ({last_line}): install the release "
            f"made for this torch"
        ) from error


def _declare_missing_operators() -> torch.library.Library | None:
    """Declare the operators that the import looks for; None if the real ones load, as torchvision loads them."""
    spec = importlib.util.find_spec("torchvision")
    folders: list[str] = []
    if spec is not None:
        folders = list(spec.submodule_search_locations or [])
    for folder in map(Path, folders):
        # Called _C_stable from torchvision 0.29 on.
        libraries = [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]
        for path in sorted(libraries):
            try:
                # torchvision loads it again, which does nothing.
                torch.ops.load_library(os.fspath(path))
                return None
            except OSError:
                continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not has_kernel(f"torchvision::{name}"):
            library.define(name + _SCHEMA)
    return library
