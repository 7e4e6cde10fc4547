"""Ranks that launch ends can find out why: because one has failed, or because somebody ended the run."""

import signal
import socket

import pytest

from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG

PATIENT = {"GRACE": 80.0}  # s: a rank that is told has time to write it down

PROGRAM = """
import os, sys, time
from mmm.errors import DataError
from mmm.runtime.failure import first_failure
rank, fault = os.environ["RANK"], sys.argv[1]
try:
    open("ready-" + rank, "w").close()  # a signal while an unnamed file ends would be lost
    if fault != "none" and rank == "1":
        while not os.path.exists("ready-0"): time.sleep(0.01)
        assert first_failure() is None                         # not while all is well
        raise DataError("no such file: x")
    [time.sleep(0.05) for _ in range(1800)]
finally:
    open("told-" + rank, "w").write(str(first_failure()))
"""
HOST = socket.gethostname()


def told(launcher, rank=0):
    return (launcher.folder / f"told-{rank}").read_text()


def test_a_users_error(launcher):
    launcher.write("t.py", PROGRAM)
    assert launcher.run("-n", "2", "python3", "t.py", "user", clocks=PATIENT).returncode == 2
    assert told(launcher) == f"rank 1 on {HOST}: no such file: x"


@SPAWNED_IN_LONG
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_somebody_ends_the_run(launcher, how, number):
    launcher.write("t.py", PROGRAM)
    process = launcher.start(*how, "-n", "2", "python3", "t.py", "none", clocks=PATIENT)
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert told(launcher, 0) == told(launcher, 1) == "None"


@pytest.mark.long
def test_no_output_for_too_long(launcher):
    launcher.write("t.py", PROGRAM)
    assert launcher.run("-n", "2", "--timeout", "4", "python3", "t.py", "none", clocks=PATIENT).returncode == 124
    assert told(launcher) == "no output from any rank for 4 s (--timeout)"
