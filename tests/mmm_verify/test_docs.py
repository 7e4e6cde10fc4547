"""The tests of docs/verify.md pass as they stand; what its commands print is in tests/docs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_tests(tmp_path):
    """The page's tests pass in a pytest of their own."""
    for name in ("mlp", "test_mlp"):
        (code,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "mmm_verify.testing.plugin", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
