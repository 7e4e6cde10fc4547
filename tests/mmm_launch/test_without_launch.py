"""What the ranks' side does where launch did not start it, and what launch itself does without."""

import socket
import subprocess
import sys

import pytest

from support.clock import PATIENCE

PROGRAM = """
import os, sys
from mmm.errors import DataError
from mmm.runtime.failure import run_main
def main():
    raise DataError("no such file: x", on_every_rank="everywhere" in sys.argv)
run_main(main)
"""
RANKS = [
    lambda rank: {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "4"},
    lambda rank: {"PMI_RANK": rank, "PMI_SIZE": "4"},
    lambda rank: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "4"},
    lambda rank: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"},
]


def run(launcher, code, *words, **variables):
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=launcher.environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}]
)  # a batch script's own
def test_a_process_that_is_alone_says_its_error_plainly(launcher, variables):
    done = run(launcher, PROGRAM, **variables)
    assert (done.returncode, done.stderr) == (2, "error: no such file: x\n")


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize("variables", RANKS)
def test_each_rank_says_its_own(launcher, variables, rank):
    """It may be the only one that has it: a file that one host lacks."""
    done = run(launcher, PROGRAM, **variables(rank))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: [rank {rank} on {socket.gethostname()}] no such file: x\n"


def test_what_all_ranks_have_rank_0_says(launcher):
    texts = [run(launcher, PROGRAM, "everywhere", **RANKS[0](rank)).stderr for rank in ("0", "3")]
    assert texts == ["error: no such file: x\n", ""]


def test_other_exceptions_stay_what_they_are(launcher):
    done = run(launcher, PROGRAM.replace("raise DataError(", "raise KeyError('no such file: x') or DataError("))
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'no such file: x'\n")


def test_launch_does_not_import_torch(launcher):
    done = run(
        launcher,
        "import sys, mmm_launch.main, mmm_launch.run.local, mmm_launch.program.preloads\n"
        "mmm_launch.main.main(['--dry-run', 'true'])\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))",
    )
    assert done.stdout.splitlines()[-1] == "[]"
