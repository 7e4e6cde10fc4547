"""What each rank runs: CMD taken apart, and checked without importing or running any of it."""

import importlib.util
import os
import pkgutil
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from mmm_launch.errors import LaunchError, did_you_mean

# Python's own flags that take a value. -m and -c take one too, and end the flags.
VALUE_FLAGS = ("W", "X")
# Python's own flags without a value. With any other (-i, -V, -mMODULE) python is run as it is.
PLAIN_FLAGS = "bBdEIOPqRsSuv"


@dataclass(frozen=True)
class Target:
    """kind "module", "script" or "code": python runs `name` with `args`. kind "program": `command` is executed."""

    kind: str
    name: str
    args: tuple[str, ...] = ()
    # Python's own: -u, -X dev, …
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def is_python(self) -> bool:
        return self.kind != "program"

    def tail(self) -> list[str]:
        """The words after python and its flags: `-m name args`, `script.py args` or `-c code args`."""
        option = {"module": ["-m"], "code": ["-c"], "script": []}[self.kind]
        return [*option, self.name, *self.args]

    def line(self) -> list[str]:
        """The full command line."""
        return [sys.executable, *self.flags, *self.tail()] if self.is_python else list(self.command)

    def first_path(self) -> str | None:
        """What python puts first on sys.path for it: the current folder for a module, the script's own for a script."""
        isolated = any(set(flag) <= set("-" + PLAIN_FLAGS) and {"I", "P"} & set(flag) for flag in self.flags)
        if isolated or os.environ.get("PYTHONSAFEPATH") or not self.is_python:
            return None
        if self.kind == "code":
            return ""
        if self.kind == "module":
            return os.getcwd()
        path = os.path.realpath(self.name)
        return path if os.path.isdir(path) else os.path.dirname(path)


def parse(command: Sequence[str]) -> Target:
    """Take CMD apart. `python` and `python3` mean the interpreter that launch is installed in."""
    program, rest = command[0], list(command[1:])
    if program not in ("python", "python3", sys.executable):
        return Target("program", program, command=tuple(command))
    target = from_tail(rest)
    if target is None:
        return Target("program", sys.executable, command=(sys.executable, *rest))
    return target


def from_tail(words: Sequence[str]) -> Target | None:
    """The target in the words after `python`, or None if they name none that a child runner can run."""
    flags: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in ("-m", "-c"):
            if not queue:
                return None
            kind = "module" if word == "-m" else "code"
            return Target(kind, queue[0], tuple(queue[1:]), tuple(flags))
        if not word.startswith("-"):
            return Target("script", word, tuple(queue), tuple(flags))
        if word in ("-W", "-X") and queue:
            flags += [word, queue.pop(0)]
        elif word[1:2] in VALUE_FLAGS or set(word[1:]) <= set(PLAIN_FLAGS):
            flags.append(word)
        else:
            return None
    return None


def check(target: Target) -> None:
    """Raise `LaunchError` if there is no such program, script or module. Imports and runs none of it."""
    if target.kind == "program":
        _check_program(target)
    elif target.kind == "script":
        _check_script(target)
    elif target.kind == "module":
        _check_module(target)


def _check_program(target: Target) -> None:
    name = target.name
    if name == sys.executable:
        if len(target.command) == 1:
            raise LaunchError("python was given no module and no script, and ranks have no terminal to read from.")
        return
    if not shutil.which(name):
        raise LaunchError(
            f"no program called {name!r}, on PATH or as a file that can be run.\n  A Python file is started by "
            f"launch python3 {name} …, a module by launch python3 -m {name} …"
        )


def _check_script(target: Target) -> None:
    path = Path(target.name)
    runs = path / "__main__.py" if path.is_dir() else path
    if not runs.exists():
        raise LaunchError(f"no such script: {runs.absolute()}")


def _check_module(target: Target) -> None:
    name = target.name
    path0 = target.first_path()
    first = [] if path0 is None else [path0]
    spec = find_module(name, first)
    if spec is None:
        parent, _, _ = name.rpartition(".")
        above = find_module(parent, first) if parent else None
        if above is not None and "__path__" in (source_of(above) or ""):
            # This package changes where its modules are found, which only importing it would tell.
            return
        folders = locations(above) if parent else first
        prefix = f"{parent}." if parent else ""
        hint = did_you_mean(name, [module.name for module in pkgutil.iter_modules(folders, prefix)])
        raise LaunchError(f"no module named {name!r}, in the current folder or on sys.path.{hint}")
    if locations(spec) and find_module(f"{name}.__main__", first) is None:
        raise LaunchError(f"{name} is a package without a __main__: python -m cannot run it.")


def find_module(name: str, first: Sequence[str] = ()) -> ModuleSpec | None:
    """The spec of module `name`, looked for in the folders `first`, then where `import` looks. None if there is none.

    Packages that change their own `__path__` while they are imported cannot be followed: for what is below them the
    answer may be None although the import works.
    """
    head, *rest = name.split(".")
    spec = PathFinder.find_spec(head, list(first)) if first else None
    # A folder without __init__.py is only a namespace package: a real package later on sys.path wins.
    if spec is None or spec.origin is None:
        spec = _installed(head) or spec
    for part in rest:
        folders = locations(spec)
        # PathFinder looks for the last part of the name only, in the parent's folders.
        spec = PathFinder.find_spec(part, folders) if folders else None
    return spec


def locations(spec: ModuleSpec | None) -> list[str]:
    """The folders in which a package's modules lie; [] for a module that is no package."""
    return list(spec.submodule_search_locations or []) if spec is not None else []


def source_of(spec: ModuleSpec) -> str | None:
    """The module's source text, or None where it has none that can be read."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    return read_source(Path(spec.origin))


def read_source(path: Path) -> str | None:
    """A source file's text in its declared encoding, or None if it cannot be read."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _installed(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
