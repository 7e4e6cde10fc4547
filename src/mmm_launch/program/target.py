"""What each rank runs: CMD taken apart, and checked without importing or running any of it."""

import difflib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from mmm_launch.errors import LaunchError

VALUE_FLAGS = "WX"  # python's own flags that take a value; -m and -c end the flags
PLAIN_FLAGS = "bBdEIOPqRsSuv"  # those that do not; with any other (-i, -x, -V, -h) python is run as it is


@dataclass(frozen=True)
class Target:
    """kind "module", "script" or "code": python runs `name` with `args`. kind "program": `command` is executed."""

    kind: str
    name: str
    args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # python's own: -u, -X dev, …
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
        isolated = any(
            f.startswith("-") and not f.startswith("--") and {"I", "P"} & set(f[1:]) and f[1] not in "WX"
            for f in self.flags
        )
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
        if word == "-" or not word.startswith("-"):
            return Target("script", word, tuple(queue), tuple(flags)) if word != "-" else None
        if word == "--check-hash-based-pycs" and queue:
            flags += [word, queue.pop(0)]
            continue
        if word.startswith("--"):
            return None
        for place, letter in enumerate(word[1:], start=1):
            value = word[place + 1 :]
            if letter in "mc":
                if place > 1:
                    flags.append(word[:place])
                if not value and not queue:
                    return None
                value = value or queue.pop(0)
                return Target("module" if letter == "m" else "code", value, tuple(queue), tuple(flags))
            if letter in VALUE_FLAGS:
                flags += [word] if value else [word, *queue[:1]]
                queue = queue if value else queue[1:]
                break
            if letter not in PLAIN_FLAGS:
                return None
        else:
            flags.append(word)
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
    name, words = target.name, target.command
    if name == sys.executable:
        if len(words) == 1:
            raise LaunchError(
                "python was given no module and no script, and ranks have no terminal to read from.\n"
                "  Try: launch python3 -m MODULE …   or   launch python3 SCRIPT.py …"
            )
        return
    if shutil.which(name):
        return
    if os.path.isdir(name):
        raise LaunchError(f"{name} is a folder, not a program.")
    if os.path.exists(name):
        hint = f"python3 {name}" if name.endswith(".py") else None
        fix = f"Try: launch {hint} …" if hint else f"Make it executable: chmod +x {name}"
        raise LaunchError(f"{name} is a file, but not a program that can be run.\n  {fix}")
    if name == "-m" or find_module(name, [os.getcwd()]) is not None:
        raise LaunchError(f"no program called {name!r} on PATH; it is a module.\n  Try: launch python3 -m {name} …")
    where = "there is no such file" if os.sep in name else "looked in every folder on PATH"
    raise LaunchError(f"no program called {name!r}: {where}.")


def _check_script(target: Target) -> None:
    path = Path(target.name)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise LaunchError(f"{path} is a folder without a __main__.py: python cannot run it.")
        return
    if path.is_file():
        return
    near = difflib.get_close_matches(path.name, [p.name for p in _siblings(path)], n=1)
    hint = f" Did you mean {path.with_name(near[0])}?" if near else ""
    raise LaunchError(f"no such script: {path} (looked in {path.absolute().parent}).{hint}")


def _siblings(path: Path) -> list[Path]:
    try:
        return [p for p in path.absolute().parent.iterdir() if p.suffix == ".py"]
    except OSError:
        return []


def _check_module(target: Target) -> None:
    name = target.name
    if name.endswith(".py"):
        raise LaunchError(f"-m takes a module's name, and {name!r} is a file's.\n  Try: launch python3 {name} …")
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise LaunchError(f"{name!r} is not a module's name: write it with dots, as in package.module.")
    path0 = target.first_path()
    first = [] if path0 is None else [path0]
    above: list[str] = []
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        spec = find_module(dotted, first)
        if spec is None:
            parent = find_module(".".join(parts[: depth - 1]), first) if depth > 1 else None
            if parent is not None and "__path__" in (source_of(parent) or ""):
                return  # it changes where its modules are found: let python decide
            raise LaunchError(_no_module(name, dotted, parts[depth - 1], above, parent is not None, path0))
        above = locations(spec)
    if above and find_module(f"{name}.__main__", first) is None:
        names = names_in(above)
        some = f" Its modules: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}." if names else ""
        raise LaunchError(f"{name} is a package without a __main__: python -m cannot run it.{some}")


def _no_module(name: str, dotted: str, part: str, above: list[str], inside: bool, path0: str | None) -> str:
    if inside:
        parent = dotted.rpartition(".")[0]
        where = f"{parent} ({', '.join(above)}) has no module {part!r}" if above else f"{parent} is not a package"
        near = difflib.get_close_matches(part, names_in(above), n=1)
    else:
        cwd = "the current folder and " if path0 is not None else ""
        where = f"{part!r} is not in {cwd}the {len(sys.path)} places on sys.path"
        near = difflib.get_close_matches(part, names_in([] if path0 is None else [path0]), n=1)
    guess = ".".join([*dotted.split(".")[:-1], *near, *name.split(".")[dotted.count(".") + 1 :]]) if near else ""
    return f"no module named {name!r}: {where}." + (f" Did you mean {guess}?" if guess else "")


def find_module(name: str, first: Sequence[str] = ()) -> ModuleSpec | None:
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
