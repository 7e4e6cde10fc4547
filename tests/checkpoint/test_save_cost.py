"""The benchmark of what a save costs the loop, on little."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "save_cost.py"


@pytest.mark.long
def test_both_kinds_of_save_are_measured(tmp_path):
    words = [sys.executable, BENCHMARK, "--parameters", "4e6", "--tensors", "8", "--pairs", "1", "--steps", "200"]
    done = subprocess.run(
        list(map(str, words)), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"blocking (\S+) s; asynchronous (\S+) s, and (\S+) s of waiting", done.stdout)
    blocking, begun, rest = map(float, found.groups())
    assert 0 < begun < blocking
    assert rest >= 0
    assert list((tmp_path / "outputs").iterdir()) == []
