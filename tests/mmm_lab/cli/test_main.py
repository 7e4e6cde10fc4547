"""What `mmm` does with a name that it does not have, and where its output cannot be written, or not all of it."""

import os
import subprocess
import sys

import pytest

from mmm.errors import ConfigError
from mmm_lab.cli.main import main
from mmm_lab.cli.sizes import parse_bytes, parse_time

MMM = [sys.executable, "-m", "mmm_lab.cli.main"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
@pytest.mark.parametrize("argv", [["machine"], ["--help"]])
def test_output_that_nobody_takes(argv):
    """A disk that is full is said in a line; a reader that has seen enough is no error; a closed output is one."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MMM, *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    said = "mmm: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
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


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("80 GB", 80e9), ("1.5TiB", 1.5 * 2**40), ("40gib", 40 * 2**30), ("68719476736", 2**36)],
)
def test_units(text, size):
    assert parse_bytes(text, "--gpu_memory") == size


@pytest.mark.parametrize("text", ["9" * 5000 + "h", "9" * 5000 + ":00", "6", "6h6", "h", "-1h", "1e3h"])
def test_wrong_times(text):
    with pytest.raises(ConfigError, match="-t "):
        parse_time(text, "-t")


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0GiB", "64Gb1", "64 parsecs", "64", "1e999GiB", "nan", "1..2GiB"]
)
def test_wrong_units(text):
    with pytest.raises(ConfigError, match="--gpu_memory"):
        parse_bytes(text, "--gpu_memory")
