"""What a program's code reads of its options, found in its source: from its `train` on, through what that calls.

Followed are functions and classes of the examples and the trainer, methods of the options and of `Run`. A check of a
value is no use of it: functions called ``check…`` are left out.
"""

import ast
import dataclasses
import importlib
import inspect
import textwrap
from types import ModuleType
from typing import get_type_hints

import tyro

from mmm.layout import Layout, Techniques
from mmm.trainer.config.flags import FLAGS
from mmm.trainer.config.options import BaseOptions, values_of
from mmm.trainer.run.core import Run

ROOMS = ("mmm.examples.", "mmm.trainer.")
HOLDERS = ("config", "options", "run", "given")  # what options are called where they are passed


def flags(config: type) -> set[str]:
    """What can be given on the command line; not what is `Unused`."""
    hints = get_type_hints(config, include_extras=True)
    return {
        field.name
        for field in dataclasses.fields(config)
        if tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ())
    }


def _is_ours(thing) -> bool:
    return callable(thing) and (getattr(thing, "__module__", None) or "").startswith(ROOMS)


def _of_options(node: ast.expr, inside: bool) -> bool:
    """Whether an expression is what options are called: ``config``, ``run.options``; in a method of them, ``self``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "options"
    if isinstance(node, ast.Call):  # super().axes()
        return inside and isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and (node.id in HOLDERS or (inside and node.id == "self"))


def reads(program: ModuleType) -> set[str]:
    """Names of options that a program's code reads."""
    config, found, seen = program.Config, set(), set()
    todo = [(program.train, False)]
    while todo:
        thing, inside = todo.pop()
        if thing in seen or not callable(thing) or getattr(thing, "__name__", "").startswith("check"):
            continue
        seen.add(thing)
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
        names = vars(inspect.getmodule(thing)) | _imported_inside(tree)
        called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for name in called:
            if _is_ours(names.get(name)) and not _is_followed_by_name(names[name]):
                todo.append((names[name], False))
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
        if "getattr" in called:
            found |= texts
        found |= _techniques_used(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "fields" and thing is not values_of:
                found |= {field.name for field in dataclasses.fields(names[ast.unparse(node.args[0])])}
            if ast.unparse(node) == "values_of(self, Layout)":
                found |= _flags_of(Layout)
            if not isinstance(node, ast.Attribute):
                continue
            through = getattr(names.get(ast.unparse(node.value)), node.attr, None)  # module.function
            if inspect.ismodule(names.get(ast.unparse(node.value))) and _is_ours(through):
                todo += [(through, False)] if not _is_followed_by_name(through) else []
            elif isinstance(node.value, ast.Name) and node.value.id in ("run", "self") and hasattr(Run, node.attr):
                todo.append((getattr(Run, node.attr), False))
            elif _of_options(node.value, inside):
                for owner in config.__mro__:  # also those that are overridden: super() reads them
                    if inspect.isfunction(method := vars(owner).get(node.attr)):
                        todo.append((method, True))
                found.add(node.attr)
    options = {name for owner in config.__mro__ for name in vars(owner) if not name.startswith("_")}
    return {
        name
        for name in found & (options | {field.name for field in dataclasses.fields(config)})
        if not callable(getattr(config, name, None))
    }


def _imported_inside(tree: ast.AST) -> dict[str, object]:
    """What code imports from our rooms where it needs it."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOMS):
            module = importlib.import_module(node.module)
            found |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return found


def _flags_of(kind: type) -> set[str]:
    """The flags of the fields of `Layout` or `Techniques`."""
    return {FLAGS.get(field.name, field.name) for field in dataclasses.fields(kind)}


def _techniques_used(tree: ast.AST) -> set[str]:
    """Flags of what is made of resolved techniques: one of ``resolved.techniques.tile``, all where they are passed
    whole. That a program resolves them, ``options.techniques()``, is no use of them."""
    found = set()
    inner = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "techniques" and id(node) not in called:
            outer = inner.get(id(node))
            found |= _flags_of(Techniques) if outer is None else {FLAGS.get(outer.attr, outer.attr)}
    return found


def _is_followed_by_name(thing) -> bool:
    """Whether its methods count only where they are called."""
    return inspect.isclass(thing) and (issubclass(thing, (BaseOptions, Run)) or thing.__name__.endswith("Options"))
