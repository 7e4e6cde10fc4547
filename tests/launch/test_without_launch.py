"""What the ranks' side does where launch did not start it, and what launch itself does without."""

import subprocess
import sys

import pytest

PROGRAM = """
from mmm.errors import DataError
from mmm.runtime.failure import run_main
def main():
    raise DataError("no such file: x")
run_main(main)
"""


def run(launcher, code, **variables):
    return subprocess.run([sys.executable, "-c", code], env=launcher.environment(**variables), capture_output=True,
                          text=True, timeout=30)


@pytest.mark.parametrize("variables", [{}, {"RANK": "0"}, {"PMI_RANK": "0"}])
def test_rank_0_says_a_users_error(launcher, variables):
    done = run(launcher, PROGRAM, **variables)
    assert (done.returncode, done.stderr) == (2, "error: no such file: x\n")


@pytest.mark.parametrize("name", ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_the_others_do_not(launcher, name):
    done = run(launcher, PROGRAM, **{name: "1"})
    assert (done.returncode, done.stderr) == (2, "")


def test_other_exceptions_stay_what_they_are(launcher):
    done = run(launcher, PROGRAM.replace("DataError(", "KeyError("))
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'no such file: x'\n")


def test_launch_does_not_import_torch(launcher):
    done = run(launcher, "import sys, mmm.launch.main, mmm.launch.supervise, mmm.launch.imports\n"
                         "mmm.launch.main.main(['--dry-run', 'true'])\n"
                         "print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    assert done.stdout.splitlines()[-1] == "[]"
