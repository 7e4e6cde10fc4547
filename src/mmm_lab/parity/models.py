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

# Read from the matrix, and not from the registry, which imports torch: the command answers without.
NAMES = tuple(name for name in read_matrix() if name != OTHERS)


def find(name: str) -> ParityModel:
    """Returns the model called `name`.

    Args:
        name: one of `NAMES`; or a file, ``mine/mlp_plan.py``, or a module, ``mine.mlp_plan``, that has ``PARITY``.

    Raises:
        ConfigError: there is no such file or module, or it has no ``PARITY``.
    """
    if name in NAMES:
        from mmm_lab.parity.registry import REGISTRY

        return REGISTRY[name]
    from mmm_lab.parity.parity_model import ParityModel

    if name.endswith(".py"):
        module = _from_file(Path(name))
    else:
        module = _from_module(name)
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
    """Import a module. Returns None if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another name is of something that the module imports: its own error says more.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _from_file(path: Path) -> ModuleType | None:
    """Import a file, once. What lies next to it can be imported, as for a script. Returns None if there is none."""
    if not path.is_file():
        return None
    # Two files of one name are two modules.
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
