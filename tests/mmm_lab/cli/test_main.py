"""What `mmm` does with a name that it does not have, and where its output cannot be written, or not all of it."""

import contextlib
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

from mmm.history import History
from mmm_lab.cli.main import SUBCOMMANDS, main
from mmm_lab.cli.sizes import parse_bytes, parse_time

MMM = [sys.executable, "-m", "mmm_lab.cli.main"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
@pytest.mark.parametrize("argv", [["machine"], ["--help"]])
def test_output_that_nobody_takes(argv):
    """A disk that is full is said in a line; a reader that has seen enough is no error; a closed output is one."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MMM, *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    message = "mmm: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)
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
    [
        (["pln"], "plan"),
        (["--hlep"], "--help"),
        (["history", "x", "--rank-s"], "--ranks"),
        (["doctor", "--jsn"], "--json"),
        (["sample", "x", "--prompt", "y", "--max_new_tokens", "3"], "--max-new-tokens"),
    ],
)
def test_what_may_have_been_meant(argv, meant, capsys):
    assert main(argv) == 2
    output = capsys.readouterr().err
    assert f"Did you mean {meant}?" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("command", ["", *SUBCOMMANDS])
def test_each_help_ends_with_examples_and_exit_codes(command, capsys):
    """And no flag has an underscore: those of trainers do."""
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    flags, _, end = capsys.readouterr().out.partition("\nexamples:\n")
    examples, _, codes = end.partition("\nexit codes: ")
    assert 1 <= len(examples.splitlines()) <= 3
    assert f"  mmm {command}".rstrip() in examples
    assert "0 " in codes
    assert len(codes.splitlines()) == 1
    assert command == "verify" or not re.search(r"^ +-\S*(, -\S+)*_", flags, re.MULTILINE)


@pytest.mark.parametrize("argv", [["plan", "--model", "gpt2", "--nhosts", "1"], ["runs", "RUNS"]])
def test_json_is_printed_or_written(argv, capsys, tmp_path):
    """The same to a file next to the text, and to standard output without the text."""
    with History(tmp_path / "runs" / "a", ranks=[{}]) as history:
        history.update({"iter": 0, "loss": 1.0, "dt": 1.0})
    argv = [str(tmp_path / "runs") if word == "RUNS" else word for word in argv]
    file = tmp_path / "a.json"
    assert main([*argv, "--json", str(file)]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 1
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)
    assert printed == file.read_text()


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("80 GB", 80e9), ("1.5TiB", 1.5 * 2**40), ("40gib", 40 * 2**30), ("68719476736", 2**36)],
)
def test_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["9" * 5000 + "h", "9" * 5000 + ":00", "6", "6h6", "h", "-1h", "1e3h"])
def test_wrong_times(text):
    with pytest.raises(ArgumentTypeError):
        parse_time(text)


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0GiB", "64Gb1", "64 parsecs", "64", "1e999GiB", "nan", "1..2GiB"]
)
def test_wrong_units(text):
    with pytest.raises(ArgumentTypeError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("runs --sort loss --sort state", "argument --sort: it is given twice"),
        ("plan --model debug --model small", "argument --model: it is given twice"),
        ("runs $NO_SUCH_FOLDER/runs", "the variable $NO_SUCH_FOLDER is not set"),
        ("history ~nobody_of_that_name/run", "no such user"),
    ],
)
def test_two_values_and_paths_that_nobody_has(line, says, capsys):
    """Of two values the last one would count alone; a folder would have the variable's name."""
    assert main(line.split()) == 2
    assert says in capsys.readouterr().err
