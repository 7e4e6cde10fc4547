"""Signals to launch reach every rank, once; and it ends with the code that belongs to them."""

import os
import signal
import time

import pytest

from support.launcher import SPAWNED_IN_LONG

SOON = 30.0  # s: at once, on a machine with ten times the work that it has cores for
PATIENT = {"GRACE": 80.0}  # s: nothing that ends SOON has waited for it

COUNT = """
import os, signal, sys, time
rank = os.environ["RANK"]
seen = []
def note(number, frame):
    seen.append(signal.Signals(number).name)
    open(f"seen-{rank}", "w").write(" ".join(seen))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, note)
open(f"ready-{rank}", "w").close()
end = time.monotonic() + 90
while time.monotonic() < end and not os.path.exists("leave"): time.sleep(0.01)
open(f"done-{rank}", "w").close()
"""
# Ranks wait in short sleeps, here and in the tests beside: Python handles a signal that comes in the instant before a
# sleep begins only when that sleep is over.
WAIT = (
    "import os, time\ntry:\n    open('ready-' + os.environ['RANK'], 'w')\n    [time.sleep(0.05) for _ in range(1800)]\n"
    "finally: open('cleaned-' + os.environ['RANK'], 'w')\n"
)


@SPAWNED_IN_LONG
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_ranks_end_in_order(launcher, how, number, code):
    launcher.write("t.py", WAIT)
    process = launcher.start(*how, "-n", "2", "python3", "t.py", clocks=PATIENT)
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(number)
    out, err = process.communicate(timeout=SOON)
    assert (process.returncode, out) == (code, "")
    assert err == f"launch: {number.name}: ending 2 ranks\n"
    assert {"cleaned-0", "cleaned-1"} <= set(os.listdir(launcher.folder))
    assert launcher.gone(within=0.1)


@SPAWNED_IN_LONG
def test_ranks_that_do_not_end_are_killed_after_the_grace(launcher, how):
    launcher.write("t.py", COUNT)
    process = launcher.start(*how, "-n", "2", "python3", "t.py")
    launcher.wait_for("ready-0", "ready-1")
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SOON)
    assert time.monotonic() - start > 0.9
    assert process.returncode == 143
    assert not (launcher.folder / "done-0").exists()
    assert launcher.gone(within=0.1)


def test_a_second_ctrl_c_kills_at_once(launcher):
    launcher.write("t.py", COUNT)
    process = launcher.start("-n", "2", "python3", "t.py", clocks=PATIENT)
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGINT)
    launcher.wait_for("seen-0", "seen-1")
    time.sleep(0.4)  # longer than a Ctrl-C may come twice
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert not (launcher.folder / "done-0").exists()
    assert launcher.gone(within=0.1)


def test_before_there_are_ranks(launcher):
    launcher.write(
        "site-packages/slow.py", "import time\nopen('importing', 'w')\n[time.sleep(0.05) for _ in range(1800)]"
    )
    launcher.write("t.py", "import slow")
    process = launcher.start(
        "-n", "2", "python3", "t.py", clocks=PATIENT, PYTHONPATH=str(launcher.folder / "site-packages")
    )
    launcher.wait_for("importing")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert launcher.gone(within=0.1)


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(launcher):
    launcher.write(
        "t.py",
        "import os, time\n"
        "while not os.path.exists('go'):\n    open('tick', 'w').write(str(time.monotonic()))\n"
        "    open('ready-' + os.environ['RANK'], 'w')\n    time.sleep(0.01)\n",
    )
    process = launcher.start("-n", "1", "python3", "t.py")
    launcher.wait_for("ready-0")
    process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(0.05)
    ticks = (launcher.folder / "tick").read_text()
    time.sleep(0.2)
    assert (launcher.folder / "tick").read_text() == ticks
    process.send_signal(signal.SIGCONT)
    launcher.write("go", "")
    process.communicate(timeout=SOON)
    assert process.returncode == 0
