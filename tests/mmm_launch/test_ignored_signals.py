"""Signals that launch was started to ignore: under nohup, or in the background of a script. They stay ignored."""

import os
import signal
import time

import pytest

from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG

BACKGROUND = (signal.SIGINT, signal.SIGQUIT)  # of a script's `launch … &`
PATIENT = {"GRACE": 80.0}  # s: ranks have time to clean up
LOOK = """
import os, signal, subprocess, time
rank = os.environ["RANK"]
def ignored(pid):
    mask = next(line for line in open(f"/proc/{pid}/status") if line.startswith("SigIgn"))
    return " ".join(n.name for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
                    if int(mask.split()[1], 16) >> (n - 1) & 1)
child = subprocess.Popen(["sleep", "60"])
while open(f"/proc/{child.pid}/comm").read() == open("/proc/self/comm").read(): time.sleep(0.01)
open("part-" + rank, "w").write(f"{ignored('self')}|{ignored(child.pid)}|{ignored(os.getppid())}")
try:
    os.rename("part-" + rank, "ready-" + rank)
    [time.sleep(0.05) for _ in range(1800)]
finally: open("cleaned-" + rank, "w").close()
"""

QUICK = {"prefork": "nohup", "spawn": "background", "host": "background"}


@pytest.fixture(params=QUICK)
def ways(request, launcher):
    """This host's ranks, and those of a cluster, whose launcher backend has launch's signals."""
    if request.param == "host":
        return launcher.on_hosts()
    return ["--no-prefork"] if request.param == "spawn" else []


@pytest.mark.parametrize(
    ("ways", "ignored"),
    [
        pytest.param(by, ignored, id=f"{by}-{name}", marks=() if name == quick else pytest.mark.long)
        for by, quick in QUICK.items()
        for name, ignored in (("nohup", (signal.SIGHUP,)), ("background", BACKGROUND))
    ],
    indirect=["ways"],
)
def test_they_stay_ignored_in_launch_its_ranks_and_what_these_start(launcher, ways, ignored):
    launcher.write("t.py", LOOK)
    process = launcher.start(*ways, "-n", "2", "--device", "cpu", "python3", "t.py", ignored=ignored, clocks=PATIENT)
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(ignored[0])
    for rank in (0, 1):
        own, childs, servers = (launcher.folder / f"ready-{rank}").read_text().split("|")
        assert own == childs == ignored[0].name
        assert ignored[0].name in servers.split()
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()  # SIGTERM still ends all, in order
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, err
    assert err.endswith("launch: SIGTERM: ending 2 ranks\n")
    assert {"cleaned-0", "cleaned-1"} <= set(os.listdir(launcher.folder))
    assert launcher.gone(within=0.5)


@SPAWNED_IN_LONG
def test_a_signal_for_the_program(launcher, how):
    """USR1 that launch ignores does not end ranks that do not expect it, nor after the fork server started anew."""
    launcher.write("site-packages/broken.py", "raise ValueError")
    launcher.write("t.py", "try: import broken\nexcept ValueError: pass\n" + LOOK)
    process = launcher.start(
        *how, "-n", "2", "python3", "t.py", ignored=(signal.SIGUSR1,), PYTHONPATH=str(launcher.folder / "site-packages")
    )
    launcher.wait_for("ready-0", "ready-1")
    assert {(launcher.folder / f"ready-{rank}").read_text().split("|")[0] for rank in (0, 1)} == {"SIGUSR1"}
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.terminate()
    assert process.communicate(timeout=PATIENCE)[1] == "launch: SIGTERM: ending 2 ranks\n"
