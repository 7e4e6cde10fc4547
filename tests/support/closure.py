"""What a module stands on: the files of mmm that it imports, and that those import, wherever an import stands.

Names that a package loads lazily (`mmm.lazy`) count as the modules that they come from: those that a file takes by
``from package import name``, or by ``alias.name``. Imports for type checkers alone do not count.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src"


def path_of(module: str) -> Path | None:
    """The file of a module of mmm; None where it is none."""
    base = SOURCE.joinpath(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def tree_of(module: str) -> ast.Module:
    path = path_of(module)
    assert path is not None, module
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def lazy_names(package: str) -> dict[str, str]:
    """Name → module, of a package that loads lazily; empty for others."""
    tree = tree_of(package)
    if not any(isinstance(n, ast.ImportFrom) and n.module == "mmm.lazy" for n in tree.body):
        return {}
    blocks = [node for node in tree.body if for_type_checkers(node)]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of mmm that a module names in its imports."""
    tree = tree_of(module)
    skipped = {id(node) for block in ast.walk(tree) if for_type_checkers(block) for node in ast.walk(block)}
    found, packages = set(), {}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "mmm":
            source = str(node.module)
            found.add(source)
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if path_of(name) is not None:
                    found.add(name)
                    packages[alias.asname or alias.name] = name
                elif alias.name in lazy_names(source):
                    found.add(lazy_names(source)[alias.name])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in skipped:
            of_package = lazy_names(packages[node.value.id]) if node.value.id in packages else {}
            found |= {of_package[node.attr]} if node.attr in of_package else set()
    return frozenset(name for name in found if path_of(name) is not None)


def closure(module: str) -> dict[str, str]:
    """Each module that `module` stands on, itself too: by what it was first reached."""
    reached, under_way = {module: ""}, [module]
    while under_way:
        here = under_way.pop(0)
        packages = {here.rsplit(".", depth)[0] for depth in range(1, here.count(".") + 1)}
        for name in sorted(imported(here) | packages):
            if name not in reached:
                reached[name] = here
                under_way.append(name)
    return reached


def lines_of(modules) -> int:
    return sum(len(path_of(module).read_text(encoding="utf-8").splitlines()) for module in modules)
