"""Takes CMD apart, and checks it without importing or running any of it."""

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
    """What each rank runs.

    Attributes:
        kind: "module", "script" or "code": python runs `name`. "program": `command` is executed.
        name: name of the module, path of the script or the program, or the code itself.
        args: arguments of a module, a script or code.
        flags: flags for python.
        command: the whole command line of a program.
    """

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
        """Return the arguments after python and its flags: `-m name args`, `script.py args` or `-c code args`."""
        option = {"module": ["-m"], "code": ["-c"], "script": []}[self.kind]
        return [*option, self.name, *self.args]

    def line(self) -> list[str]:
        """Return the full command line."""
        if not self.is_python:
            return list(self.command)
        return [sys.executable, *self.flags, *self.tail()]

    def script(self) -> Path:
        """Return the file that python runs for a script. A folder is run by its __main__.py."""
        path = Path(self.name)
        if path.is_dir():
            return path / "__main__.py"
        return path

    def search_path(self) -> list[str]:
        """Return the folders that python searches before the usual ones: `first_path`, or none."""
        first = self.first_path()
        if first is None:
            return []
        return [first]

    def first_path(self) -> str | None:
        """Return what python puts first on sys.path: the current folder for a module, a script's own for a script.

        None: it puts nothing there, because of a flag or PYTHONSAFEPATH.
        """
        if os.environ.get("PYTHONSAFEPATH") or not self.is_python:
            return None
        for flag in self.flags:
            letters = set(flag)
            # -I and -P may stand together with other flags, as in -uI; but the value of -X may contain an I, too.
            if letters <= set("-" + PLAIN_FLAGS) and letters & {"I", "P"}:
                return None
        if self.kind == "code":
            return ""
        if self.kind == "module":
            return os.getcwd()
        path = os.path.realpath(self.name)
        if os.path.isdir(path):
            return path
        return os.path.dirname(path)


def parse(command: Sequence[str]) -> Target:
    """Take CMD apart. `python` and `python3` mean the interpreter that launch is installed in."""
    program = command[0]
    rest = list(command[1:])
    if program not in ("python", "python3", sys.executable):
        return Target("program", program, command=tuple(command))
    target = from_tail(rest)
    # Flags that launch does not know: run python as it was typed, as any other program.
    if target is None:
        return Target("program", sys.executable, command=(sys.executable, *rest))
    return target


def from_tail(argv: Sequence[str]) -> Target | None:
    """Read the target in the arguments after `python`. None: they name none that `mmm_launch.host.child` can run."""
    flags: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        if word in ("-m", "-c"):
            if not queue:
                return None
            kind = "code"
            if word == "-m":
                kind = "module"
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
    script = target.script()
    if not script.exists():
        raise LaunchError(f"no such script: {script.absolute()}")


def _check_module(target: Target) -> None:
    name = target.name
    first = target.search_path()
    spec = find_module(name, first)
    if spec is None:
        parent, _, _ = name.rpartition(".")
        above = None
        folders = first
        prefix = ""
        if parent:
            above = find_module(parent, first)
            folders = locations(above)
            prefix = f"{parent}."
        if above is not None and "__path__" in (source_of(above) or ""):
            # This package changes where its modules are found, which only importing it would tell.
            return
        # The names next to the one that is missing: one of them may be what was meant.
        hint = did_you_mean(name, [module.name for module in pkgutil.iter_modules(folders, prefix)])
        raise LaunchError(f"no module named {name!r}, in the current folder or on sys.path.{hint}")
    if locations(spec) and find_module(f"{name}.__main__", first) is None:
        raise LaunchError(f"{name} is a package without a __main__: python -m cannot run it.")


def find_module(name: str, first: Sequence[str] = ()) -> ModuleSpec | None:
    """Find the spec of module `name` without importing it or its packages. None: there is no such module.

    A package that changes its own `__path__` while it is imported cannot be followed. For a module below it the answer
    may be None although importing it would work.

    Args:
        first: folders that are searched before those where `import` looks.
    """
    head, *rest = name.split(".")
    spec = None
    if first:
        spec = PathFinder.find_spec(head, list(first))
    # A folder without __init__.py is only a namespace package: a real package later on sys.path wins.
    if spec is None or spec.origin is None:
        spec = _installed(head) or spec
    for submodule in rest:
        folders = locations(spec)
        # PathFinder looks for the last part of the name only, in the parent's folders.
        spec = None
        if folders:
            spec = PathFinder.find_spec(submodule, folders)
    return spec


def locations(spec: ModuleSpec | None) -> list[str]:
    """Return the folders in which a package's modules lie; [] for a module that is not a package."""
    if spec is None:
        return []
    return list(spec.submodule_search_locations or [])


def source_of(spec: ModuleSpec) -> str | None:
    """Return a module's source text. None: it has none, or it cannot be read."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    return read_source(Path(spec.origin))


def read_source(path: Path) -> str | None:
    """Return a source file's text, decoded as it declares. None: it cannot be read."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _installed(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
