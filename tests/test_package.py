"""The package as a whole: light to import, quick to answer, and rooms that call downwards only."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.clock import PATIENCE, children_cpu

SOURCE = Path(__file__).parent.parent / "src" / "mmm"
# From the top down; a room may name what stands below it. Rooms that are still to come stand here too.
ROOMS = (
    *("examples", "trainer", "plan", "parity", "analysis", "parallel", "models", "data", "checkpoint", "history"),
    *("testing", "runtime", "launch", "contract", "comparison", "streams", "errors"),
)
LAUNCH_ROOMS = ("__main__", "main", "host", "control", "job")
APART = {("runtime", "launch")}  # both know `contract`, and neither the other
BESIDE = "cli"  # may name every room, and none names it
# What still breaks the rule: (file, module). It only gets shorter.
STILL: set[tuple[str, str]] = set()
# A module's name in a help text or a message, which people read and no code does.
FOR_PEOPLE = {
    ("launch/main.py", "mmm.examples.fsdp_tp"),
    ("launch/job/options.py", "mmm.examples.fsdp_tp"),
    ("models/weights.py", "mmm.parallel.meta_parameters"),
    ("plan/models.py", "mmm.trainer.fsdp"),  # which a printed launch line starts
    ("plan/models.py", "mmm.trainer.lm"),
    ("plan/models.py", "mmm.trainer.vit"),
    ("plan/script.py", "mmm.trainer.lm"),
    ("plan/spec.py", "mmm.trainer.lm"),
}
# The command that a program becomes where its line asks for what the command does: executed, and not imported.
BECOMES = {("trainer/dry_run.py", "mmm.cli.main")}
# The modules that launch starts as processes of their own. They are named, and not imported.
PROCESSES = {"mmm.launch.host.agent", "mmm.launch.host.forkserver", "mmm.launch.host.child"}
NAME = re.compile(r"\bmmm(?:\.\w+)+")


def named(path):
    """The modules of mmm that a file's code names: by any import, wherever it stands, or in a string."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            inside = node.module == "mmm" or (SOURCE.parent / str(node.module).replace(".", "/")).is_dir()
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if inside else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield from NAME.findall(node.value)


def wrong(path, rooms, depth):
    """What `path` may not name. A module's room is the part of its name at `depth`."""
    here = path.relative_to(SOURCE).with_suffix("").parts[depth - 1]
    for name in named(path):
        parts = [*name.split("."), ""]
        if parts[0] != "mmm" or here not in rooms or parts[depth] in (here, ""):
            continue
        there = parts[depth]
        known = there in rooms and (here, there) not in APART
        if there == BESIDE or (
            there in ROOMS + LAUNCH_ROOMS and not (known and rooms.index(there) > rooms.index(here))
        ):
            yield str(path.relative_to(SOURCE)), name


def test_rooms_name_only_what_is_below_them():
    found = {each for path in SOURCE.rglob("*.py") for each in wrong(path, ROOMS, 1)}
    assert found - STILL == FOR_PEOPLE | BECOMES
    assert not STILL - found, "these have been put right: take them out of STILL"


def test_rooms_of_launch():
    """Imports go from what runs on the hosts to control to the job; main knows all."""
    found = {each for path in (SOURCE / "launch").rglob("*.py") for each in wrong(path, LAUNCH_ROOMS, 2)}
    assert not {(file, name) for file, name in found if name not in PROCESSES and name.startswith("mmm.launch")}


@pytest.mark.parametrize(
    "text",
    [
        "import mmm.trainer.run",
        "from mmm import trainer",
        "def f():\n    from mmm.trainer.run import Run",
        "if TYPE_CHECKING:\n    from mmm.trainer import Run",
        "PLACES = {'Run': 'mmm.trainer.run'}",
        "command = [python, '-m', 'mmm.trainer.lm']",
        "code = f'from mmm.trainer import {name}'",
    ],
)
def test_every_way_to_name_a_module_is_seen(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "runtime").mkdir()
    path = tmp_path / "runtime" / "a.py"
    path.write_text(f'"""Prose may name mmm.trainer."""\n{text}\n')
    assert len(list(wrong(path, ROOMS, 1))) == 1


def test_models_import_nothing_else():
    for path in (SOURCE / "models").rglob("*.py"):
        others = {n for n in named(path) if n.startswith("mmm.") and not n.startswith("mmm.models")}
        assert others <= {name for file, name in FOR_PEOPLE if file.startswith("models/")}, path


def test_no_torch_in_launch():
    for path in [*(SOURCE / "launch").rglob("*.py"), SOURCE / "contract.py", SOURCE / "errors.py"]:
        assert "torch" not in [name.split(".")[0] for name in named(path)], path


@pytest.mark.parametrize("package", ["checkpoint", "data", "history", "parallel", "trainer"])
def test_a_package_that_loads_lazily(package):
    """What type checkers see is what there is, and no module of the package has a name of those."""
    found = importlib.import_module(f"mmm.{package}")
    (block,) = [node for node in ast.parse(inspect.getsource(found)).body if isinstance(node, ast.If)]
    assert dir(found) == sorted(alias.name for node in block.body for alias in node.names)
    for name in dir(found):
        assert not (SOURCE / package / f"{name}.py").exists(), name
        assert not isinstance(getattr(found, name), ModuleType)


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
    names = "ddp zero hsdp tensor_parallel pipeline context_parallel parallel_4d collectives traffic moe tiling startup"
    assert {f"mmm.examples.{name}" for name in (*names.split(), "checkpoint")} < set(listed)
    assert {f"mmm.trainer.{name}" for name in ("lm", "vit", "fsdp")} < set(listed)


def test_unknown_subcommand():
    done = subprocess.run([sys.executable, "-m", "mmm.cli.main", "histroy"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "mmm: error: no subcommand 'histroy': did you mean history?\n")
