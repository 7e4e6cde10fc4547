"""Which models there are: found by the names of two files, so that one more needs no other file changed.

::

    models/NAME.py           parity_model(), a small one; parity_batch(samples, numbers), made-up samples; and if there
                             is more to a step than the optimizer's, parity_after_step(model), on one device
    parallel/plans/NAME.py   NAME_plan(), how it is cut

``NAME`` means these in mmm; ``package.NAME`` means ``package/models/NAME.py`` and ``package/parallel/plans/NAME.py``.
docs/models.md is the recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mmm.errors import ConfigError

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Model:
    """Attributes:
    source: the model's own module, which knows nothing of meshes.
    plan: how it is cut: without arguments → `mmm.parallel.plan.Plan`.
    """

    source: ModuleType
    plan: Callable


def names() -> list[str]:
    """The models of mmm itself: files that are in both folders."""
    found = ({path.stem for path in (ROOT / room).glob("*.py")} for room in ("models", "parallel/plans"))
    return sorted(set.intersection(*found) - {"__init__"})


def find(name: str) -> Model:
    """The model called `name`.

    Raises:
        ConfigError: one of its two files is not there, or lacks what it has to have.
    """
    package, _, short = f"mmm.{name}".rpartition(".") if "." not in name else name.rpartition(".")
    source = _load(f"{package}.models.{short}", name, ("parity_model", "parity_batch"))
    plans = _load(f"{package}.parallel.plans.{short}", name, (f"{short}_plan",))
    return Model(source, getattr(plans, f"{short}_plan"))


def _load(module: str, name: str, wanted: tuple[str, ...]) -> ModuleType:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # something that a package imports
            raise
        found = False
    if not found:
        raise ConfigError(
            f"--model {name}: there is no {module.replace('.', '/')}.py; the models here are "
            f"{', '.join(names())}, and docs/models.md says how to add one"
        )
    loaded = importlib.import_module(module)
    if lacks := [function for function in wanted if not hasattr(loaded, function)]:
        raise ConfigError(
            f"--model {name}: {loaded.__file__} has no {' and no '.join(lacks)}; docs/models.md says what it is for"
        )
    return loaded
