"""The one place that imports torchvision.

Its wheels carry compiled operators for one build of torch. Next to another build (a CPU-only torch, a site's own) they
do not load, and ``import torchvision`` ends in ``RuntimeError: operator torchvision::nms does not exist``, although
data sets and transforms do not need that operator. Declaring two operators lets the import succeed; the declarations
are withdrawn after it.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import torch

from mmm.errors import DataError

# torchvision's import registers fake and autocast versions of these.
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision(submodule: str) -> ModuleType:
    """Import a submodule of torchvision such as ``datasets``, whether or not its compiled operators load here.

    Raises:
        DataError: torchvision is not installed, or its import fails for another reason.
    """
    module = f"torchvision.{submodule}"
    with warnings.catch_warnings():
        # It warns about its image decoder and the operators that are missing.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise
            raise DataError("torchvision is not installed, and this data needs it: pip install torchvision") from None
        except (ImportError, OSError, RuntimeError) as error:
            problem = str(error)
        # The declarations last as long as this object.
        library = torch.library.Library("torchvision", "FRAGMENT")
        try:
            for name in _OPERATORS:
                library.define(name + _SCHEMA)
            return importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            raise DataError(
                f"torchvision cannot be imported next to torch {torch.__version__} ({problem}): install the release "
                f"made for this torch"
            ) from error
