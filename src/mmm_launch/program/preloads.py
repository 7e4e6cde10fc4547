"""Finds the modules that a target will import, by reading its source. They are imported once, before ranks are forked.

Nothing of the user's is imported or run for this. The user's own modules are read as text, and so are the modules that
they import in turn. Only installed packages and mmm's own modules are preloaded.
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
    """`import module`, or `from module import names`. A name may be a submodule."""

    module: str
    names: tuple[str, ...] = ()


def preloads(target: Target) -> list[Preload]:
    """Return what `target` imports at the top level of its modules, in the order in which it would."""
    scan = _Scan(target.search_path())
    if target.kind == "code":
        scan.text(target.name, "", is_main=True)
    elif target.kind == "script":
        scan.text(read_source(target.script()), "", is_main=True)
    elif target.kind == "module":
        scan.target(target.name)
    return list(scan.preloads)


@dataclass
class _Scan:
    """Reads sources and collects what they import."""

    # Folders that are searched before sys.path.
    first: list[str]
    # A dict as an ordered set: modules are imported in the order in which the target would.
    preloads: dict[Preload, None] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    # The target's own name. It is never preloaded: it has to run as __main__.
    main: str = ""
    # The target's top-level package. It is read as text, not imported.
    root: str = ""

    def target(self, name: str) -> None:
        """Read the target of `python -m name`."""
        spec = find_module(name, self.first)
        if spec is not None and locations(spec):
            name = f"{name}.__main__"
            spec = find_module(name, self.first)
        self.main = name
        self.root = name.partition(".")[0]
        # Python imports the package before it runs a module of it.
        parent = name.rpartition(".")[0]
        if parent:
            self.module(parent, ())
        if spec is not None:
            self.text(source_of(spec), parent, is_main=True)

    def module(self, name: str, names: tuple[str, ...]) -> None:
        """Note `import name` or `from name import names`. A module of the user's own is read in turn."""
        top = name.partition(".")[0]
        if name in ("", self.main):
            return
        if top in OURS:
            imported = tuple(attribute for attribute in names if f"{name}.{attribute}" != self.main)
            self.preloads[Preload(name, imported)] = None
            return
        spec = find_module(top, self.first)
        if spec is None:
            # The module is missing: the target itself will say so, with its own traceback.
            return
        if top != self.root and is_installed(top, spec):
            self.preloads[Preload(name, names)] = None
            return
        # `import a.b.c` imports a, then a.b, then a.b.c.
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            self.local(".".join(parts[:depth]))
        for imported_name in names:
            self.local(f"{name}.{imported_name}")

    def local(self, name: str) -> None:
        """Read a module of the user's own, unless it has been read or is none."""
        if name in self.seen or name == self.main or len(self.seen) >= MAX_FILES:
            return
        self.seen.add(name)
        spec = find_module(name, self.first)
        if spec is None:
            return
        package = name
        if not locations(spec):
            package = name.rpartition(".")[0]
        self.text(source_of(spec), package)

    def text(self, source: str | None, package: str, is_main: bool = False) -> None:
        """Follow the imports of a source text.

        Args:
            source: the text; None: it could not be read.
            package: name of the package that it lies in, for relative imports.
            is_main: whether it runs as __main__.
        """
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
                name = absolute_name(node, package)
                self.module(name, tuple(alias.name for alias in node.names if alias.name != "*"))
                for alias in node.names:
                    modules[alias.asname or alias.name] = f"{name}.{alias.name}"
        # The packages of mmm import a name only when it is used, as `package.name`. So uses count as imports.
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
    """Yield the statements that are executed for certain, also inside of `try`, `with` and the test for __main__."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from _statements([*node.body, *node.orelse, *node.finalbody], is_main)
        if isinstance(node, ast.With):
            yield from _statements(node.body, is_main)
        # The branch of any other `if` may not be taken: what it imports is left to the ranks.
        if isinstance(node, ast.If) and is_main and ast.unparse(node.test) == MAIN_TEST:
            yield from _statements(node.body, is_main)


def is_installed(top: str, spec: ModuleSpec) -> bool:
    """Say whether a top-level package is installed or in the standard library, and not the user's own."""
    # torch may be built from source, outside of site-packages.
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "torch":
        return True
    paths = locations(spec)
    if spec.origin:
        paths = [spec.origin]
    return any(set(Path(path).parts) & set(INSTALLED) for path in paths)


def absolute_name(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module in `from … import`; "" if the dots lead above the top-level package."""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return ""
