"""A package whose names are imported when they are asked for: who takes one does not pay for the others."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        names: module → the names that the package has from it, with spaces between them. None is that of a module of
            the package, which would take its place once it is imported.
    """
    modules = {name: module for module, line in names.items() for name in line.split()}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return __getattr__, lambda: sorted(modules)
