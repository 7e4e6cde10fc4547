"""Which models there are: found by the names of two files, so that one more needs no other file changed.

::

    models/NAME.py           parity_model(), a small one; parity_batch(samples, numbers), made-up samples; and if there
                             is more to a step than the optimizer's, parity_after_step(model), on one device
    parallel/plans/NAME.py   NAME_plan(), how it is sharded

``package.NAME`` means ``package/models/NAME.py`` and ``package/parallel/plans/NAME.py``. A plain ``NAME`` means mmm's
own ``parity/fixtures/NAME.py``, and its plan in ``parallel/plans``, or in ``parity/fixtures/plans`` where the proof
alone needs it. docs/models.md is the recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mmm.errors import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"


@dataclass(frozen=True)
class Model:
    """Attributes:
    source: the model's own module, which knows nothing of meshes.
    plan: how it is sharded: without arguments → `mmm.parallel.plan.Plan`.
    """

    source: ModuleType
    plan: Callable


def names() -> list[str]:
    """The models of mmm itself."""
    return sorted(path.stem for path in FIXTURES.glob("*.py") if path.stem != "__init__")


def find(name: str) -> Model:
    """The model called `name`.

    Raises:
        ConfigError: one of its two files is not there, or lacks what it has to have.
    """
    package, _, short = name.rpartition(".")
    source, plans = f"{package}.models.{short}", f"{package}.parallel.plans.{short}"
    if not package:
        source = f"mmm.parity.fixtures.{short}"
        own = (FIXTURES / "plans" / f"{short}.py").exists()
        plans = f"mmm.parity.fixtures.plans.{short}" if own else f"mmm.parallel.plans.{short}"
    found = _load(source, name, ("parity_model", "parity_batch"))
    return Model(found, getattr(_load(plans, name, (f"{short}_plan",)), f"{short}_plan"))


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
