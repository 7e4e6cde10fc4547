"""Find a module's source the way `import` would, without importing anything, its parent packages included."""

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def find(name: str, first: Sequence[str] = ()) -> ModuleSpec | None:
    """The spec of module `name`, looked for in the folders `first`, then where `import` looks. None if there is none.

    Packages that change their own `__path__` while they are imported cannot be followed: for what is below them the
    answer may be None although the import works.
    """
    head, *rest = name.split(".")
    spec = PathFinder.find_spec(head, list(first)) if first else None
    if spec is None or spec.origin is None:  # a folder without __init__.py gives way to a real package further on
        spec = next((s for f in sys.meta_path if (s := _ask(f, head)) is not None), None) or spec
    for part in rest:
        folders = locations(spec)
        spec = PathFinder.find_spec(part, folders) if folders else None  # by its last name: finders use no other
    return spec


def locations(spec: ModuleSpec | None) -> list[str]:
    """The folders in which a package's modules lie; [] for a module that is no package."""
    return list(spec.submodule_search_locations or []) if spec is not None else []


def source(spec: ModuleSpec) -> str | None:
    """The module's source text, or None where it has none that can be read."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    return read(Path(spec.origin))


def read(path: Path) -> str | None:
    """A source file's text in its declared encoding, or None if it cannot be read."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def names_in(folders: Iterable[str]) -> list[str]:
    """Names of the modules and packages that lie in these folders."""
    found = set()
    for folder in folders:
        try:
            entries = list(os.scandir(folder or os.curdir))
        except OSError:
            continue
        for entry in entries:
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ".py" or (not suffix and stem.isidentifier() and entry.is_dir()):
                found.add(stem)
    return sorted(found - {"__init__", "__pycache__"})


def _ask(finder: object, name: str) -> ModuleSpec | None:
    find_spec = getattr(finder, "find_spec", None)
    try:
        return find_spec(name, None) if find_spec else None
    except (ImportError, AttributeError, ValueError):
        return None
