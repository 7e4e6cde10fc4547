"""The package as a whole: light to import, quick to answer. `make lint` checks what may import what."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import closure as closures
from support.clock import PATIENCE, children_cpu
from support.closure import closure, lines_of

SOURCE = Path(__file__).parent.parent / "src" / "mmm"
NAME = re.compile(r"\bmmm(?:\.\w+)+")
# The modules of other rooms that a string names (`lint-imports` sees no strings): most in help texts, messages and
# printed lines, which people read and no code does.
IN_STRINGS = {
    ("examples/_support/four_axes.py", "mmm.trainer.cnn"),
    ("examples/_support/four_axes.py", "mmm.trainer.vit"),
    ("examples/scaling.py", "mmm.launch"),
    ("examples/scaling.py", "mmm.trainer.lm"),
    ("launch/main.py", "mmm.examples.fsdp_tp"),
    ("launch/plan/options.py", "mmm.examples.fsdp_tp"),
    ("models/weights.py", "mmm.parallel.meta_parameters"),
    ("plan/image_models.py", "mmm.trainer.cnn"),
    ("propose/code.py", "mmm.parallel"),  # the code that it writes
    ("propose/code.py", "mmm.parallel.dp.sync_batch_norm"),
    ("propose/code.py", "mmm.parallel.tp.sections"),
    ("trainer/run/utilization.py", "mmm.machines.peaks"),  # which a message names
    ("trainer/run/record.py", "mmm.history.plots.draw"),  # which it runs
    ("trainer/run/standard.py", "mmm.profile.trace_picture"),  # likewise
    ("plan/models.py", "mmm.trainer.lm"),
    ("plan/image_models.py", "mmm.trainer.vit"),
    ("plan/script.py", "mmm.trainer.lm"),
    ("plan/spec.py", "mmm.trainer.lm"),
}


def modules_in_strings(path: Path, room: str) -> set[str]:
    """The modules of rooms other than `room` that a file's strings name; docstrings are prose."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in prose]
    names = {name for node in nodes if isinstance(node.value, str) for name in NAME.findall(node.value)}
    return {name for name in names if name.split(".")[1] != room}


def test_strings_name_no_other_rooms():
    """But for cli's, which may name all, and those of lazy packages, which the test below reads."""
    named = set()
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE)
        if file.parts[0] != "cli" and file.name != "__init__.py":
            named |= {(str(file), name) for name in modules_in_strings(path, file.parts[0])}
    assert named == IN_STRINGS


@pytest.mark.parametrize(
    "text",
    [
        "PLACES = {'Run': 'mmm.trainer.run'}",
        "command = ['-m', 'mmm.trainer.lm']",
        "code = f'from mmm.trainer import {x}'",
    ],
)
def test_a_module_in_a_string_is_seen(text, tmp_path):
    path = tmp_path / "a.py"
    path.write_text(f'"""Prose may name mmm.trainer."""\nx = "mmm.runtime.ranks"\n{text}\n')
    assert len(modules_in_strings(path, "runtime")) == 1


@pytest.mark.parametrize("file", sorted((SOURCE / "examples").glob("*.py")), ids=lambda file: file.stem)
def test_every_example_is_short(file):
    assert len(file.read_text().splitlines()) <= 150


LONGEST = 60  # lines of a function
# Those that are longer still: (file, function). It only gets shorter.
STILL_LONGER: set[tuple[str, str]] = set()


def longer(path: Path) -> set[str]:
    """The functions of a file that are too long."""
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {each.name for each in functions if (each.end_lineno or 0) - each.lineno + 1 > LONGEST}


def test_no_long_file():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert {str(path.relative_to(SOURCE)): count for path, count in lines.items() if count > 350} == {}


def test_no_long_function():
    too_long = {(str(path.relative_to(SOURCE)), name) for path in SOURCE.rglob("*.py") for name in longer(path)}
    assert too_long - STILL_LONGER == set()
    assert STILL_LONGER - too_long == set(), "these have been split: take them out of STILL_LONGER"


def test_a_long_function_is_seen(tmp_path):
    path = tmp_path / "a.py"
    text = "class A:\n    def long(self):\n" + "        pass\n" * 60 + "    def short(self):\n" + "        pass\n" * 59
    path.write_text(text)
    assert longer(path) == {"long"}


@pytest.mark.parametrize("package", ["checkpoint", "data", "examples._support", "history", "parallel", "trainer"])
def test_a_package_that_loads_lazily(package):
    """What type checkers and `lint-imports` see is what there is, and no module of the package has a name of those."""
    loaded = importlib.import_module(f"mmm.{package}")
    tree = ast.parse(inspect.getsource(loaded))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    (call,) = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {module: set(line.split()) for module, line in ast.literal_eval(call.args[1]).items()}
    assert names == {
        module: {alias.name for node in block.body if node.module == module for alias in node.names}
        for module in {node.module for node in block.body}
    }
    assert dir(loaded) == sorted(set.union(*names.values()))
    for name in dir(loaded):
        assert not SOURCE.joinpath(*package.split("."), f"{name}.py").exists(), name
        assert not isinstance(getattr(loaded, name), ModuleType)


def test_import_is_light():
    code = (
        "import sys, time; begin = time.perf_counter(); import mmm; seconds = time.perf_counter() - begin; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(seconds)"
    )
    best = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert best < 0.05


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "mmm.launch", "--help"],
        ["-m", "mmm.cli.main", "--help"],
        ["-m", "mmm.cli.main", "examples"],
        ["-m", "mmm.examples"],
        ["-m", "mmm.examples", "--help"],
        ["-m", "mmm.cli.main", "--version"],
        ["-m", "mmm.parity", "--help"],
        ["-m", "mmm.parity", "--dry_run"],
    ],
    ids=lambda c: " ".join(c[1:]),
)
def test_answers_at_once_and_without_torch(command, tmp_path):
    """A torch that cannot be imported stands first on the path: nothing may need it."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {"PYTHONPATH": f"{tmp_path}:{SOURCE.parent}", "PATH": "/usr/bin:/bin"}
    seconds = []
    for _ in range(2):
        begin = children_cpu()
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=PATIENCE)
        seconds.append(children_cpu() - begin)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert min(seconds) < 1.0


def test_list_of_examples():
    done = subprocess.run([sys.executable, "-m", "mmm.examples"], capture_output=True, text=True, check=True)
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("mmm."))
    assert listed["mmm.examples.fsdp_tp"].startswith("Two-dimensional parallelism")
    names = "ddp zero hsdp tensor_parallel pipeline context_parallel parallel_4d collectives traffic moe tiling"
    assert {f"mmm.examples.{name}" for name in (*names.split(), "checkpoint")} < set(listed)
    assert {f"mmm.trainer.{name}" for name in ("lm", "vit", "cnn")} < set(listed)


def test_unknown_subcommand():
    done = subprocess.run([sys.executable, "-m", "mmm.cli.main", "histroy"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "mmm: error: no subcommand 'histroy': did you mean history?\n")


CLOSURES = [  # module, files, lines
    ("mmm.examples.checkpoint", 68, 9_000),
    ("mmm.examples.collectives", 66, 8_400),
    ("mmm.examples.context_parallel", 122, 14_800),
    ("mmm.examples.ddp", 69, 9_100),
    ("mmm.examples.fsdp", 98, 11_800),
    ("mmm.examples.fsdp_tp", 67, 8_892),
    ("mmm.examples.hsdp", 75, 9_400),
    ("mmm.examples.moe", 127, 15_305),
    ("mmm.examples.parallel_4d", 138, 16_300),
    ("mmm.examples.pipeline", 133, 15_800),
    ("mmm.examples.scaling", 52, 6_000),
    ("mmm.examples.tensor_parallel", 60, 7_900),
    ("mmm.examples.tiling", 123, 14_800),
    ("mmm.examples.traffic", 133, 16_700),
    ("mmm.examples.zero", 75, 9_400),
    ("mmm.parallel.loss", 6, 433),
    ("mmm.trainer.lm", 216, 28_550),
    ("mmm.trainer.vit", 197, 25_250),
    ("mmm.launch.__main__", 57, 7_150),
]


@pytest.mark.parametrize(("module", "files", "lines"), CLOSURES)
def test_what_a_program_stands_on(module, files, lines):
    """What a reader may have to open: the bounds only get lower."""
    found = closure(module)
    assert len(found) <= files, sorted(found)
    assert lines_of(found) <= lines


def test_every_kind_of_import_counts(tmp_path, monkeypatch):
    """Inside functions, of a package that loads lazily by name and by attribute; not those for type checkers."""
    monkeypatch.setattr(closures, "SOURCE", tmp_path)
    for cached in (closures.tree_of, closures.lazy_names, closures.imported):
        cached.cache_clear()
    room = tmp_path / "mmm" / "room"
    room.mkdir(parents=True)
    for name in ("__init__", "lazy"):
        (tmp_path / "mmm" / f"{name}.py").touch()
    lazily = (
        "from mmm.lazy import lazy\nif TYPE_CHECKING:\n    from mmm.room.a import A\n    from mmm.room.b import B\n"
    )
    (room / "__init__.py").write_text(lazily)
    for name in "abcd":
        (room / f"{name}.py").touch()
    texts = (
        ("from mmm.room import A", {"a"}),
        ("from mmm import room\nroom.B", {"b"}),
        ("def f():\n    from mmm.room.c import C", {"c"}),
        ("if TYPE_CHECKING:\n    from mmm.room.d import D", set()),
    )
    for text, expected in texts:
        (tmp_path / "mmm" / "x.py").write_text(text)
        closures.tree_of.cache_clear()
        closures.imported.cache_clear()
        found = {name.rpartition(".")[2] for name in closure("mmm.x")} - {"mmm", "lazy", "room", "x"}
        assert found == expected, text
    for cached in (closures.tree_of, closures.lazy_names, closures.imported):
        cached.cache_clear()
