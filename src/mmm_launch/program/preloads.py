"""Which modules a target will import, read from its source: the ones worth importing once, before ranks are forked.

Nothing of the user's is imported or run for it. The user's own modules are read as text, and followed to what they
import in turn; what is worth preloading are installed packages and mmm's own modules.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

from mmm_launch.program.target import Target, find_module, locations, read_source, source_of

# The most files of the user's own that are read. It bounds the time of a start.
MAX_FILES = 400
INSTALLED = ("site-packages", "dist-packages")
# These packages are preloaded from a source tree too.
OURS = ("mmm", "mmm_launch", "mmm_verify", "mmm_lab")
MAIN_TEST = "__name__ == '__main__'"


@dataclass(frozen=True)
class Preload:
    """`import module`, or `from module import names` (a name may be a submodule)."""

    module: str
    names: tuple[str, ...] = ()


def preloads(target: Target) -> list[Preload]:
    """What `target` imports at the top level of its modules, in the order in which it would."""
    path0 = target.first_path()
    scan = _Scan([] if path0 is None else [path0])
    if target.kind == "code":
        scan.text(target.name, "", is_main=True)
    elif target.kind == "script":
        path = Path(target.name)
        scan.text(read_source(path / "__main__.py" if path.is_dir() else path), "", is_main=True)
    elif target.kind == "module":
        scan.target(target.name)
    return list(scan.found)


@dataclass
class _Scan:
    # Folders that are searched before sys.path.
    first: list[str]
    # A dict as an ordered set: modules are imported in the order in which the target would.
    found: dict[Preload, None] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    # The target's own name. It is never preloaded: it has to run as __main__.
    main: str = ""
    # The target's top-level package. It is read as text, not imported.
    root: str = ""

    def target(self, name: str) -> None:
        spec = find_module(name, self.first)
        if spec is not None and locations(spec):
            name, spec = f"{name}.__main__", find_module(f"{name}.__main__", self.first)
        self.main, self.root = name, name.partition(".")[0]
        parent = name.rpartition(".")[0]
        if parent:
            self.module(parent, ())
        if spec is not None:
            self.text(source_of(spec), parent, is_main=True)

    def module(self, name: str, names: tuple[str, ...]) -> None:
        """`import name` or `from name import names`."""
        top = name.partition(".")[0]
        if name in ("", self.main):
            return
        if top in OURS:
            self.found[Preload(name, tuple(n for n in names if f"{name}.{n}" != self.main))] = None
            return
        spec = find_module(top, self.first)
        if spec is None:
            # The module is missing: the target itself will say so, with its own traceback.
            return
        if top != self.root and is_installed(top, spec):
            self.found[Preload(name, names)] = None
            return
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            self.local(".".join(parts[:depth]))
        for each in names:
            self.local(f"{name}.{each}")

    def local(self, name: str) -> None:
        """Read one of the user's own modules, if it is one and has not been read."""
        if name in self.seen or name == self.main or len(self.seen) >= MAX_FILES:
            return
        self.seen.add(name)
        spec = find_module(name, self.first)
        if spec is not None:
            package = name if locations(spec) else name.rpartition(".")[0]
            self.text(source_of(spec), package)

    def text(self, source: str | None, package: str, is_main: bool = False) -> None:
        """Follow the imports of a source text, which lies in `package`."""
        try:
            tree = ast.parse(source or "")
        except (SyntaxError, ValueError, RecursionError):
            # The target itself will raise this error, where the user sees it.
            return
        # The name by which this source refers to a module → the module.
        modules: dict[str, str] = {}
        for node in _statements(tree.body, is_main):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.module(alias.name, ())
                    modules[alias.asname or alias.name] = alias.name
            elif isinstance(node, ast.ImportFrom):
                name = _absolute(node, package)
                self.module(name, tuple(alias.name for alias in node.names if alias.name != "*"))
                for alias in node.names:
                    modules[alias.asname or alias.name] = f"{name}.{alias.name}"
        # `package.name`, where `package` is one of ours: it imports the name when it is asked for.
        used: dict[str, list[str]] = {}
        for inner in ast.walk(tree):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                module = modules.get(inner.value.id, "")
                if module.partition(".")[0] in OURS:
                    used.setdefault(module, []).append(inner.attr)
        for module, names in used.items():
            if find_module(module, self.first) is not None:
                self.module(module, tuple(dict.fromkeys(names)))


def _statements(body: Sequence[ast.stmt], is_main: bool) -> Iterator[ast.stmt]:
    """The statements that are executed for certain. Any other `if` may not be taken: that is left to the ranks."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from _statements([*node.body, *node.orelse, *node.finalbody], is_main)
        elif isinstance(node, ast.With) or (
            isinstance(node, ast.If) and is_main and ast.unparse(node.test) == MAIN_TEST
        ):
            yield from _statements(node.body, is_main)


def is_installed(top: str, spec: ModuleSpec) -> bool:
    """Is top-level package `top` the standard library's or an installed one, rather than the user's own?"""
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "torch":
        return True
    places = [spec.origin] if spec.origin else locations(spec)
    return any(set(Path(place).parts) & set(INSTALLED) for place in places)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The name of the module in `from … import`; "" where it would be above the top."""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return ""
