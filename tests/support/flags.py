"""What a program's code reads of its flags, found in the sources of the examples and the trainer that it stands on."""

import ast
from dataclasses import fields

from mmm.layout import Layout, Techniques
from mmm.trainer.config.run import FLAGS
from support.closure import closure, tree_of

ROOMS = ("mmm.examples.", "mmm.trainer.")


def attributes(tree: ast.AST, defined: bool = False) -> set[str]:
    """Names read as attributes, but in functions called ``check…``: a check of a value is no use of it."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check"):
            continue
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif (isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr") or isinstance(node, ast.Tuple):
            found |= {
                each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and type(each.value) is str
            }
        found |= attributes(node)
    return found


def reads(program: str) -> set[str]:
    """Names that the code of a program reads."""
    files = [name for name in closure(program) if name.startswith(ROOMS)]
    found = set().union(*(attributes(tree_of(name)) for name in files))
    if "mmm.trainer.config.layout" in files:  # which takes them by name
        found |= {FLAGS.get(field.name, field.name) for kind in (Layout, Techniques) for field in fields(kind)}
    return found
