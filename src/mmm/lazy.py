"""Packages whose names are imported when they are asked for: who takes one does not pay for the others."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: the package's ``__name__``.
        names: the names that the package has from each module, with spaces between them. No name may be that of a
            module of the package: once the module is imported, Python puts it in the name's place.
    """
    # The module of each name.
    modules = {}
    for module, line in names.items():
        for name in line.split():
            modules[name] = module

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return __getattr__, lambda: sorted(modules)
