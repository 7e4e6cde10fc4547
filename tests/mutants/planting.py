"""Plants a mistake by the syntax tree: one function is found by its name, and a piece of it is replaced.

Formatting, comments and the file that a function stands in do not matter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = Path("src")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@cache
def texts(root: Path) -> dict[Path, str]:
    """The text of every file of the packages."""
    return {path: path.read_text("utf-8") for path in sorted((root / SOURCE).rglob("*.py"))}


def defined(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Qualified name and node of each function, class, and constant of a module or a class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(tree, ast.FunctionDef):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, node
        elif isinstance(node, ast.stmt):
            # Below an `if`, a `with` or a `try`.
            yield from defined(node, prefix)


def find(function: str, module: str = "", root: Path = ROOT) -> tuple[Path, ast.Module, Definition]:
    """The file that defines `function`, its tree, and the node of the function in it.

    Args:
        function: qualified name, such as ``clip_gradients`` or ``Class.method``; or the name of a constant.
        module: the end of the module's name, where several modules define the function.

    Raises:
        ValueError: there is not exactly one.
    """
    matches = []
    # Most files do not define a thing of that name: they are not parsed.
    name = function.rpartition(".")[2]
    definition = re.compile(rf"^ *((async )?def|class) {name}\b|^ *{name}\b.*=", re.MULTILINE)
    for path, text in texts(root).items():
        file = ".".join(path.relative_to(root / SOURCE).with_suffix("").parts)
        if not f".{file}".endswith(f".{module}" if module else ""):
            continue
        if name not in text or not definition.search(text):
            continue
        tree = ast.parse(text)
        matches += [(path, tree, node) for qualified, node in defined(tree) if qualified == function]
    if len(matches) != 1:
        files = ", ".join(str(path.relative_to(root)) for path, _, _ in matches)
        raise ValueError(f"{function} is defined {len(matches)} times, not once: {files}")
    return matches[0]


def expression(code: str) -> ast.expr | None:
    """`code` as an expression, None where it is something else."""
    try:
        return ast.parse(code.strip(), mode="eval").body
    except SyntaxError:
        return None


def is_rest(body: object) -> bool:
    """Whether a body is ``...`` alone, which stands for any statements."""
    return isinstance(body, list) and [ast.unparse(line) for line in body if isinstance(line, ast.stmt)] == ["..."]


def same(pattern: object, code: object, rest: list[ast.stmt]) -> bool:
    """Whether `code` is what `pattern` says. Adds to `rest` the statements for which the pattern has ``...``.

    A dict of the pattern is equal to one that has its entries, and others.
    """
    if is_rest(pattern) and isinstance(code, list):
        rest += code
        return True
    if isinstance(pattern, list):
        if not isinstance(code, list) or len(pattern) != len(code):
            return False
        return all(same(*pair, rest) for pair in zip(pattern, code, strict=True))
    if not isinstance(pattern, ast.AST):
        return pattern == code and type(pattern) is type(code)
    if isinstance(pattern, ast.expr_context):
        # A name that is read is equal to one that is assigned.
        return True
    if type(pattern) is not type(code):
        return False
    if isinstance(pattern, ast.Dict):
        if pattern.keys:
            return entries(pattern).items() <= entries(code).items()
        return not code.keys
    return all(
        same(getattr(pattern, field), getattr(code, field), rest) for field in pattern._fields if field != "kind"
    )


def entries(node: ast.Dict) -> dict[str, str]:
    """The entries of a dict that is written out."""
    keys = ["**" if key is None else ast.unparse(key) for key in node.keys]
    return dict(zip(keys, map(ast.unparse, node.values), strict=True))


class Place(NamedTuple):
    """Where the code to replace stands: `length` items of a list from `index` on, or the field itself."""

    parent: ast.AST
    field: str
    index: int | None
    rest: list[ast.stmt]


def places(node: ast.AST, before: ast.expr | list[ast.stmt]) -> Iterator[Place]:
    """Each place at or below `node` that has `before`."""
    pattern = before if isinstance(before, list) else [before]
    for parent in ast.walk(ast.Module([node], [])):
        for field, value in ast.iter_fields(parent):
            if not isinstance(value, list):
                rest: list[ast.stmt] = []
                if same(before, value, rest):
                    yield Place(parent, field, None, rest)
                continue
            for index in range(len(value)):
                rest = []
                if same(pattern, value[index : index + len(pattern)], rest):
                    yield Place(parent, field, index, rest)


class WithRest(ast.NodeTransformer):
    """Puts statements where the code that takes another's place has ``...``."""

    def __init__(self, rest: list[ast.stmt]) -> None:
        self.rest = rest

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        if self.rest and ast.unparse(node) == "...":
            return self.rest
        return node


def with_entries(old: ast.Dict, before: ast.Dict, after: ast.Dict) -> ast.Dict:
    """`old` with the entries of `after` where those of `before` were."""
    replaced = entries(before)
    keys = list(after.keys)
    values = list(after.values)
    for key, value in zip(old.keys, old.values, strict=True):
        if key is None or ast.unparse(key) not in replaced:
            keys.append(key)
            values.append(value)
    return ast.Dict(keys, values)


def planted(function: str, before: str, after: str, module: str = "", root: Path = ROOT) -> tuple[Path, str]:
    """The file that the mistake is in, and its text with the mistake.

    Args:
        before: an expression or statements, which the function has once. A body that is ``...`` stands for any.
        after: what takes its place; nothing at all for statements that are left out.

    Raises:
        ValueError: the function, or `before` in it, is not there once.
    """
    path, tree, node = find(function, module, root)
    old: ast.expr | list[ast.stmt] | None = expression(before)
    new: ast.expr | list[ast.stmt] | None = expression(after)
    if old is None or new is None:
        old = ast.parse(before).body
        new = ast.parse(after).body or [ast.Pass()]
    matches = list(places(node, old))
    if len(matches) != 1:
        raise ValueError(f"{function} has the code to replace {len(matches)} times, not once")
    place = matches[0]
    if isinstance(new, list):
        new = WithRest(place.rest).visit(ast.Module(new, [])).body
    siblings = getattr(place.parent, place.field)
    if isinstance(old, ast.Dict) and isinstance(new, ast.Dict):
        new = with_entries(siblings if place.index is None else siblings[place.index], old, new)
    if place.index is None:
        setattr(place.parent, place.field, new)
    elif isinstance(old, list):
        siblings[place.index : place.index + len(old)] = new
    else:
        siblings[place.index] = new
    return path, ast.unparse(ast.fix_missing_locations(tree))
