"""The fuzzer of files as it is started: it finds faults that are planted, and none in what stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.clock import PATIENCE

TESTS = Path(__file__).parent.parent
PLANTED = """
import sys
from fuzz_files.__main__ import main
from support.file_faults import kind
sys.exit(main(sys.argv[2:], (kind(sys.argv[1]),)))
"""


def run(*words):
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE, env=environment, cwd=TESTS
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("reader", "cases", "words"),
    [
        ("lets_errors_out", 8, "traceback .*(JSONDecodeError|UnicodeDecodeError)"),
        ("waits", 1, r"hang +\S*file_faults.py:waits"),
        ("fills_memory", 2, "memory .*MemoryError"),
        ("runs", 2, r"executed\s+.*\n.*os.system"),
        ("writes_outside", 2, r"executed\s+.*\n.*outside/new, outside of the folder"),
        ("ends", 2, r"crash .*\n.*\n.*ended by SIGABRT"),
        ("says_it_raw", 2, r"terminal\s+.*\n.*\\\\x1b.* is written to the terminal"),
    ],
)
def test_planted_faults(tmp_path, reader, cases, words):
    done = run("-c", PLANTED, reader, "--cases", str(cases), "--seed", "1", "--scratch", str(tmp_path / "s"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(words, done.stdout), done.stdout


@pytest.mark.long
def test_a_sound_reader_has_none(tmp_path):
    done = run("-c", PLANTED, "sound", "--cases", "150", "--seed", "1", "--scratch", str(tmp_path / "s"))
    assert done.returncode == 0, done.stdout + done.stderr
    planted = re.findall(r"^planted +(\d+) +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    ((cases, refused, read),) = [tuple(map(int, row)) for row in planted]
    assert (cases, refused + read) == (150, 150)
    assert min(refused, read) > 20
    assert not (tmp_path / "s").exists()


@pytest.mark.long
def test_five_of_every_kind(tmp_path):
    """The same ones each time: `make fuzz-files` is for new ones."""
    done = run("-m", "fuzz_files", "--cases", "230", "--seed", "0", "--scratch", str(tmp_path / "s"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^[a-z-]+ +\d+ ", done.stdout, re.MULTILINE)) > 35, done.stdout
