"""The package as a whole: light to import, quick to answer. `make lint` checks what may import what."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.clock import PATIENCE, children_cpu

# All packages are there.
SOURCE = Path(__file__).parent.parent / "src"


@pytest.mark.parametrize("package", ["checkpoint", "data", "examples._support", "history", "parallel", "trainer"])
def test_a_package_that_loads_lazily(package):
    """Each of its names is there, and none of them hides a module."""
    loaded = importlib.import_module(f"mmm.{package}")
    assert dir(loaded)
    for name in dir(loaded):
        assert not isinstance(getattr(loaded, name), ModuleType), name


def test_import_is_light():
    code = (
        "import sys, time; begin = time.process_time(); import mmm; seconds = time.process_time() - begin; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(seconds)"
    )
    best = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert best < 0.1


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "mmm_launch", "--help"],
        ["-m", "mmm_lab.cli.main", "--help"],
        ["-m", "mmm_lab.cli.main", "examples"],
        ["-m", "mmm.examples"],
        ["-m", "mmm.examples", "--help"],
        ["-m", "mmm_lab.cli.main", "--version"],
        ["-m", "mmm_lab.parity", "--help"],
        ["-m", "mmm_lab.parity", "--dry_run"],
    ],
    ids=lambda c: " ".join(c[1:]),
)
def test_answers_at_once_and_without_torch(command, tmp_path):
    """A torch that cannot be imported stands first on the path: nothing may need it."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {"PYTHONPATH": f"{tmp_path}:{SOURCE}", "PATH": "/usr/bin:/bin"}
    seconds = []
    for _ in range(2):
        begin = children_cpu()
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=PATIENCE)
        seconds.append(children_cpu() - begin)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert min(seconds) < 2.0


def test_list_of_examples():
    done = subprocess.run([sys.executable, "-m", "mmm.examples"], capture_output=True, text=True, check=True)
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("mmm."))
    assert listed["mmm.examples.fsdp_tp"].startswith("Two-dimensional parallelism")
    names = "ddp zero hsdp tensor_parallel pipeline context_parallel space parallel_4d collectives traffic moe tiling"
    assert {f"mmm.examples.{name}" for name in (*names.split(), "checkpoint")} < set(listed)
    assert {f"mmm.trainer.{name}" for name in ("lm", "vit", "cnn")} < set(listed)


def test_unknown_subcommand():
    done = subprocess.run([sys.executable, "-m", "mmm_lab.cli.main", "histroy"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'histroy'" in done.stderr
    assert "history?" in done.stderr
