"""``parity(…)``: the command, run in a fork of one process that has imported PyTorch, once for this folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mmm

DRIVER = Path(__file__).parent.parent / "support" / "parity_driver.py"


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """``parity("--model", "cnn", …, bug="", cwd=None)`` → code, out, err; cwd is a new folder if None."""
    env = {**os.environ, "PYTHONPATH": str(Path(mmm.__file__).parent.parent)}
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )

    def run(*arguments, bug="", cwd=None):
        cwd = tmp_path_factory.mktemp("parity") if cwd is None else cwd
        driver.stdin.write(json.dumps({"arguments": list(map(str, arguments)), "cwd": str(cwd), "bug": bug}) + "\n")
        driver.stdin.flush()
        return SimpleNamespace(**json.loads(driver.stdout.readline()))

    yield run
    driver.stdin.close()
    assert driver.wait(60) == 0
