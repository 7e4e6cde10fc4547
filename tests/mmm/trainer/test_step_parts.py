"""`benchmarks/step_parts.py` measures; whether a bound is met is for a quiet machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

BENCHMARK = Path(__file__).parent.parent.parent.parent / "benchmarks" / "step_parts.py"


@pytest.mark.long
@pytest.mark.parametrize(("figure", "shown"), [("row", r"\d+\.\d+ ms"), ("optimizer", r"\d+\.\d%")])
def test_a_figure(figure, shown):
    words = [sys.executable, BENCHMARK, "--only", figure]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode in (0, 1), done.stderr
    assert re.search(rf"^{figure} +{shown} +bound: ", done.stdout, re.MULTILINE), done.stdout + done.stderr
