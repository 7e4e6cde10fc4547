"""What ranks and launch print, where it cannot be written: the run goes on, and its exit code is its own."""

import shlex
import subprocess
import sys

import pytest

from support.clock import PATIENCE
from support.launcher import START

PROGRAM = """
import logging, os, sys
from mmm.runtime.failure import run_main
def main():
    log = logging.getLogger()
    log.addHandler(logging.StreamHandler(sys.stdout))
    for number in range(3000):
        print(number)
        log.warning("%d", number)
    print("is lost", file=sys.stderr)
    open("done-" + os.environ["RANK"], "w").close()
    sys.exit(int(sys.argv[1]))
run_main(main)
"""


def piped(launcher, line):
    """The exit code of `line` before its pipe, and what is printed."""
    how = {"cwd": launcher.folder, "env": launcher.environment(), "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], **how, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirected", "says"),
    [
        (">&-", ""),
        ("--timeout 9 >&-", ""),
        ("--timeout 9 >/dev/full", "launch: what is printed cannot be written from here on: No space left on device\n"),
    ],
)
def test_stdout_that_takes_nothing(launcher, redirected, says):
    flags, _, where = redirected.rpartition(">")
    line = f"{shlex.join(START)} -n 1 --device cpu {flags} python3 -c 'print(1)' >{where}"
    assert piped(launcher, line) == (0, "", says)


@pytest.mark.parametrize("kind", ["", "--no-prefork", "--timeout 90", "host"])
@pytest.mark.parametrize(("redirected", "code"), [("", 0), ("2>&1", 7)])
def test_a_reader_that_has_seen_enough(launcher, kind, redirected, code):
    launcher.write("t.py", PROGRAM)
    words = launcher.on_hosts() if kind == "host" else kind.split()
    line = shlex.join([*START, *words, "-n", "2", "--device", "cpu", "python3", "t.py", str(code)])
    found, out, err = piped(launcher, f"{line} {redirected} | head -1")
    assert (launcher.folder / "done-0").exists() or (launcher.folder / "done-1").exists()  # a failure ends the other
    assert (found, out.count("\n")) == (code, 1)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    if not code:
        assert all((launcher.folder / f"done-{rank}").exists() for rank in range(2))


def test_a_program_without_launch(launcher):
    launcher.write(
        "t.py",
        "from mmm.runtime.failure import run_main\n"
        "def main():\n    for n in range(30000): print(n)\n    open('done', 'w').close()\nrun_main(main)",
    )
    assert piped(launcher, f"{sys.executable} t.py | head -1") == (0, "0\n", "")
    assert (launcher.folder / "done").exists()
