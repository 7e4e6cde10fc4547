"""Ranks that a signal has stopped, once their run was saved: exit code 75, which is no failure, and time to save."""

import signal

from support.launcher import SPAWNED_IN_LONG

ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "0": sys.exit(75)
time.sleep(0.5)
raise OSError("no file")
"""
SAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(number, frame):
    time.sleep(2.5)  # longer than a rank has by itself
    open(f"saved-{rank}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(f"ready-{rank}", "w").close()
[time.sleep(0.05) for _ in range(1800)]
"""
SAYS = "launch: a signal has stopped the run, and its state is saved: --resume auto goes on from there\n"


def test_a_failure_is_the_cause(launcher):
    done = launcher.run("-n", "2", "python3", "-c", ONE_FAILS)
    assert done.returncode == 1
    assert "OSError: no file" in done.stderr
    assert SAYS not in done.stderr


@SPAWNED_IN_LONG
def test_sigterm_with_grace(launcher, how):
    process = launcher.start(*how, "-n", "2", "--grace", "80", "--retries", "3", "python3", "-c", SAVES)
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (143, "launch: SIGTERM: ending 2 ranks\n")
    assert all((launcher.folder / f"saved-{rank}").exists() for rank in range(2))
    assert launcher.gone(within=0.5)
