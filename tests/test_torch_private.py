"""PyTorch's private names stand in `mmm.torch_private` alone."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "mmm"
PRIVATE = re.compile(r"_(?!_)\w+")  # a dunder is Python's
MODULE = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")
# Of Python itself; the first line has documented ones.
OF_PYTHON = {"_asdict", "_exit", "_fields", "_replace"} | {"_current_frames", "_registry", "_shutdown"}
OF_PYTHON |= {"_actions", "_lru_cache_wrapper", "_run_exitfuncs"}
# Private methods and attributes of PyTorch's classes that ours override: `mmm.torch_private` lists them.
OVERRIDDEN = {"_init_group", "_unscale_grads_", "_apply", "_slice_file", "_step_supports_amp_scaling"}
OVERRIDDEN_AT = {  # the files that call the overridden method, or set the attribute
    ("parallel/optimizer.py", "_init_group"),
    ("parallel/memory/disk.py", "_init_group"),
    ("trainer/loop/muon.py", "_init_group"),
    ("trainer/loop/muon.py", "_step_supports_amp_scaling"),
    ("parallel/dp/replicas.py", "_apply"),
    ("parallel/tp/tensor_parallel.py", "_apply"),
    ("checkpoint/storage.py", "_slice_file"),
}
# Strings: operators in a schema, keys in others' files, ends of our own names.
TEXTS = {"_c10d_functional", "_grouped_mm", "_local_scalar_dense"} | {"_growth_tracker", "_name_or_path"}
TEXTS |= {
    "_argmax",
    "_gbps",
    "_gradient",
    "_max",
    "_median",
    "_min",
    "_out",
    "_output",
    "_plan",
    "_sources",
    "_token_id",
    "_weights",
}


def private_names(tree: ast.AST, defined: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name in a file that `defined`, the package's own names, does not explain:
    by an import, as an attribute, or in a string."""
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = module + alias.name
                if not name.startswith("mmm.") and any(map(PRIVATE.fullmatch, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in defined:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            private = PRIVATE.fullmatch(node.value) and node.value not in defined
            if private or MODULE.fullmatch(node.value):
                yield node.lineno, node.value


def names_defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_no_other_file_has_a_private_name():
    trees = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    trees = {path: tree for path, tree in trees.items() if path.parts[0] != "torch_private"}
    defined = {name for tree in trees.values() for name in names_defined(tree)} - OVERRIDDEN
    known = defined | OF_PYTHON | TEXTS
    uses = {(str(path), name) for path, tree in trees.items() for _, name in private_names(tree, known)}
    assert uses == OVERRIDDEN_AT


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._guards import active_fake_mode",
        "from torch.distributed.tensor import _random",
        "if TYPE_CHECKING:\n    from torch.nn.modules.conv import _ConvNd",
        "torch.distributed.distributed_c10d._get_default_group()",
        "def f(mesh):\n    return mesh['dp', 'cp']._flatten('dp_cp')",
        "getattr(torch.cuda, '_is_in_bad_fork')",
        "PRELOADED = ['torch.distributed._composable']",
        "logging.getLogger('torch.distributed.tensor._redistribute')",
    ],
)
def test_every_use_is_seen(text):
    assert len(list(private_names(ast.parse(text), {"_own"}))) == 1


def test_own_names_and_prose_are_not_private_names():
    text = '"""torch._dynamo and _flatten."""\nself._own = model._own\nfrom mmm.a import _own\nmodel.__dict__'
    assert list(private_names(ast.parse(text), {"_own"})) == []


def test_each_says_its_versions_and_what_would_replace_it():
    for path in (SOURCE / "torch_private").rglob("*.py"):
        text = path.read_text()
        if path.name != "__init__.py":
            notes = [" ".join(note.replace("#", "").split()) for note in text.split("Private:")[1:]]
            assert notes, path
            assert all(re.search(r"seen in 2\.\d\d.*; instead: \w", note) for note in notes), path


def test_it_costs_no_more_than_torch():
    """What a file's top imports, ``import torch`` has loaded; the fork server's needs no torch."""
    names = ", ".join(f"mmm.torch_private.{path.stem}" for path in (SOURCE / "torch_private").glob("[!_]*.py"))
    code = (
        "import sys, mmm.torch_private.startup; assert 'torch' not in sys.modules; "
        f"import torch; before = set(sys.modules); import {names}; "
        "print(*(name for name in set(sys.modules) - before if not name.startswith('mmm')))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []
