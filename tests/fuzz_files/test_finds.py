"""The fuzzer of files as it is started: it finds a fault that is planted, and none in what stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

TESTS = Path(__file__).parent.parent
PLANTED = """
import os, sys
from fuzz_files.__main__ import main
from fuzz_files.kinds import Kind
def make(folder):
    (folder / "a.json").write_text('{"name": "a"}')
def read(folder):
    return (folder / "a.json").read_text() == '{"name": "a"}' or os.system("true")
sys.exit(main(sys.argv[1:], (Kind("planted", make, ("a.json",), read),)))
"""


def run(*argv):
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=PATIENCE, env=environment, cwd=TESTS
    )


@pytest.mark.long
def test_a_reader_that_starts_a_program_is_found(tmp_path):
    done = run("-c", PLANTED, "--cases", "4", "--seed", "1", "--scratch", str(tmp_path / "s"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"executed\s+.*\n.*os.system", done.stdout), done.stdout


@pytest.mark.long
def test_five_of_every_kind(tmp_path):
    """The same ones each time: `make fuzz-files` is for new ones."""
    done = run("-m", "fuzz_files", "--cases", "230", "--seed", "0", "--scratch", str(tmp_path / "s"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^[a-z-]+ +\d+ ", done.stdout, re.MULTILINE)) > 35, done.stdout
