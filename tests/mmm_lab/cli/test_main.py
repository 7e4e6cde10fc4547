"""What `mmm` does where its output cannot be written, or not all of it."""

import os
import subprocess
import sys

import pytest

from mmm_lab.cli.main import main as mmm

MMM = [sys.executable, "-m", "mmm_lab.cli.main"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
@pytest.mark.parametrize("argv", [["machine"], ["--help"]])
def test_output_that_nobody_takes(argv):
    """A disk that is full is said in a line; a reader that has seen enough is no error; a closed output is one."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MMM, *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "mmm: error: standard output cannot be written: No space left on device\n",
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*MMM, *argv], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    command = 'exec "$0" -m mmm_lab.cli.main "$@" >&-'
    done = subprocess.run(["bash", "-c", command, sys.executable, *argv], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("doctor --timeout inf", "--timeout"),
        ("doctor --timeout 1e300", "--timeout 1e+300"),
        ("diverge a b --tolerance nan", "--tolerance"),
        ("diverge a b --tolerance -1", "--tolerance -1"),
        ("runs --sort", "--sort"),
        ("compare a --by miles", "--by"),
    ],
)
def test_numbers_and_words_that_are_none(argv, said, capsys):
    assert mmm(argv.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
