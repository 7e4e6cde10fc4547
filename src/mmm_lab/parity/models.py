"""Which models there are: those of the registry, and a user's own, which a module or a file has as ``PARITY``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm_lab.parity.layouts import OTHERS, read_matrix

if TYPE_CHECKING:
    from mmm_lab.parity.parity_model import ParityModel

# Of the matrix, and not of the registry, which imports torch: the command answers without.
NAMES = tuple(name for name in read_matrix() if name != OTHERS)


def find(name: str) -> ParityModel:
    """The model called `name`: one of `NAMES`; or ``PARITY`` of a file, ``mine/mlp_plan.py``, or of a module,
    ``mine.mlp_plan``.

    Raises:
        ConfigError: there is no such file or module, or it has no ``PARITY``.
    """
    if name in NAMES:
        from mmm_lab.parity.registry import REGISTRY

        return REGISTRY[name]
    from mmm_lab.parity.parity_model import ParityModel

    module = _from_file(Path(name)) if name.endswith(".py") else _from_module(name)
    if module is None:
        raise ConfigError(
            f"--model {name}: there is no such file or module; the models here are {', '.join(NAMES)}, and "
            f"docs/models.md says how to add one"
        )
    model = getattr(module, "PARITY", None)
    if not isinstance(model, ParityModel):
        raise ConfigError(f"--model {name}: {module.__file__} has no PARITY = ParityModel(…); see docs/models.md")
    return model


def _from_module(name: str) -> ModuleType | None:
    try:
        exists = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # something that a package imports
            raise
        exists = False
    return importlib.import_module(name) if exists else None


def _from_file(path: Path) -> ModuleType | None:
    """A file as a module, made once; what lies beside it can be imported, as for a script."""
    if not path.is_file():
        return None
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
