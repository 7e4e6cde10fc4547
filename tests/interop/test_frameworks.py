"""`mmm verify` on programs of frameworks, each in an environment of its own; docs/frameworks.md has the table."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop
SCRIPT = Path(__file__).parents[2] / "benchmarks/frameworks.py"
FRAMEWORKS = sorted(path.stem for path in (SCRIPT.parent / "frameworks/requirements").glob("*.txt"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_verdict_is_as_expected(framework):
    done = subprocess.run([sys.executable, SCRIPT, "--only", framework], capture_output=True, text=True)
    assert not done.returncode, f"{done.stdout}\n{done.stderr}"
