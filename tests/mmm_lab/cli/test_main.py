"""What `mmm` does with a name that it does not have, and where its output cannot be written, or not all of it."""

import os
import subprocess
import sys

import pytest

from mmm_lab.cli.main import main

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
    ("argv", "meant"),
    [(["pln"], "plan"), (["history", "x", "--rank-s"], "--ranks"), (["doctor", "--jsn"], "--json")],
)
def test_what_may_have_been_meant(argv, meant, capsys):
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"Did you mean {meant}?" in said
    assert said.count("\n") == 1
