"""The package as a whole: light to import, quick to answer, and rooms that call downwards only."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "mmm"
# From the top down; a room may import what stands below it. cli stands beside them all.
ROOMS = (
    "examples",
    "trainer",
    "parity",
    "parallel",
    "models",
    "data",
    "history",
    "testing",
    "runtime",
    "launch",
    "errors",
)
ALLOWED_SIDEWAYS = {("examples", "cli")}  # `python -m mmm.examples` is `mmm examples`


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_rooms_call_downwards():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in ROOMS:
            continue
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "mmm" or len(parts) == 1 or parts[1] == room or (room, parts[1]) in ALLOWED_SIDEWAYS:
                continue
            if parts[1] not in ROOMS or ROOMS.index(parts[1]) < ROOMS.index(room):
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_models_import_nothing_else():
    for path in (SOURCE / "models").glob("*.py"):
        assert not [n for n in imports_of(path) if n.split(".")[0] == "mmm" and not n.startswith("mmm.models")], path


def test_launch_imports_no_torch():
    for path in (SOURCE / "launch").glob("*.py"):
        assert "torch" not in [name.split(".")[0] for name in imports_of(path)], path


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
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120)
        seconds.append(time.perf_counter() - begin)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert min(seconds) < 1.0


def test_list_of_examples():
    done = subprocess.run([sys.executable, "-m", "mmm.examples"], capture_output=True, text=True, check=True)
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("mmm."))
    assert listed["mmm.examples.fsdp_tp"].startswith("Two-dimensional parallelism")
    names = "ddp zero hsdp tensor_parallel pipeline context_parallel parallel_4d collectives traffic moe tiling startup"
    assert {f"mmm.examples.{name}" for name in names.split()} < set(listed)
    assert {f"mmm.trainer.{name}" for name in ("lm", "vit", "fsdp")} < set(listed)


def test_unknown_subcommand():
    done = subprocess.run([sys.executable, "-m", "mmm.cli.main", "histroy"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "mmm: error: no subcommand 'histroy': did you mean history?\n")
