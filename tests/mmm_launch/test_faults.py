"""A few of what `benchmarks/faults.py` does by the hundred."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts, and network namespaces, need root")
@pytest.mark.parametrize("name", ["a process is killed", "a disk fills", "loopback is lost", "few open files"])
def test_nothing_is_left_and_the_record_is_readable(tmp_path, name):
    words = [sys.executable, str(BENCHMARK), "--faults", "2", "--only", name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was wrong" in done.stdout
