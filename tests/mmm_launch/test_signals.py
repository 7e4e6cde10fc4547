"""Signals to launch reach every rank, once; it ends with the code that belongs to them; ranks can ask why they end, and
have time to save. Signals that launch was started to ignore stay ignored."""

import os
import signal
import socket
import time

import pytest

from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG

# s: at once, on a machine with ten times the work that it has cores for
SOON = 30.0
# s: nothing that ends SOON has waited for it; ranks have time to clean up
PATIENT = {"GRACE": 80.0}
# Of a script's `launch … &`.
BACKGROUND = (signal.SIGINT, signal.SIGQUIT)

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
# sleep begins only when that sleep is over. Where `fails` is given, rank 1 fails once rank 0 is there.
WAIT = """
import os, sys, time
from mmm.errors import DataError
from mmm.runtime.failure import first_failure
rank = os.environ["RANK"]
try:
    open("ready-" + rank, "w").close()  # a signal while an unnamed file ends would be lost
    if "fails" in sys.argv and rank == "1":
        while not os.path.exists("ready-0"): time.sleep(0.01)
        assert first_failure() is None                         # not while all is well
        raise DataError("no such file: x")
    [time.sleep(0.05) for _ in range(1800)]
finally:
    open("told-" + rank, "w").write(str(first_failure()))
"""
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


def written(launcher, name):
    """What rank 0 and rank 1 have written into their files of this name."""
    return [(launcher.folder / f"{name}-{rank}").read_text() for rank in (0, 1)]


@SPAWNED_IN_LONG
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_ranks_end_in_order(launcher, launch_options, signum, code):
    process = launcher.begin(WAIT, *launch_options, clocks=PATIENT)
    process.send_signal(signum)
    out, err = process.communicate(timeout=SOON)
    assert (process.returncode, out) == (code, "")
    assert err == f"launch: {signum.name}: ending 2 ranks\n"
    # Nothing has failed.
    assert written(launcher, "told") == ["None", "None"]
    assert launcher.gone(within=0.1)


def test_a_rank_is_told_which_other_has_failed(launcher):
    launcher.write("t.py", WAIT)
    assert launcher.run("-n", "2", "python3", "t.py", "fails", clocks=PATIENT).returncode == 2
    assert written(launcher, "told")[0] == f"rank 1 on {socket.gethostname()}: no such file: x"


@SPAWNED_IN_LONG
def test_ranks_that_do_not_end_are_killed_after_the_grace(launcher, launch_options):
    process = launcher.begin(COUNT, *launch_options)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SOON)
    assert time.monotonic() - start > 0.9
    assert process.returncode == 143
    assert not (launcher.folder / "done-0").exists()
    assert launcher.gone(within=0.1)


def test_a_second_ctrl_c_kills_at_once(launcher):
    process = launcher.begin(COUNT, clocks=PATIENT)
    process.send_signal(signal.SIGINT)
    launcher.wait_for("seen-0", "seen-1")
    # Longer than a Ctrl-C may come twice.
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert not (launcher.folder / "done-0").exists()
    assert launcher.gone(within=0.1)


def test_before_there_are_ranks(launcher):
    launcher.write(
        "site-packages/slow.py", "import time\nopen('ready-0', 'w')\n[time.sleep(0.05) for _ in range(1800)]"
    )
    process = launcher.begin("import slow", ranks=1, clocks=PATIENT, PYTHONPATH=str(launcher.folder / "site-packages"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert launcher.gone(within=0.1)


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(launcher):
    process = launcher.begin(
        "import os, time\nos.symlink(f'/proc/{os.getpid()}', 'rank')\nopen('ready-0', 'w')\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n",
        ranks=1,
    )
    process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    # The signal to the rank may come later than launch's own.
    stat = launcher.folder / "rank/stat"
    deadline = time.monotonic() + SOON
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the rank goes on"
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    launcher.write("go", "")
    process.communicate(timeout=SOON)
    assert process.returncode == 0


# One way to ignore a signal for each way to start; all others are long.
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
def test_ignored_signals_stay_so_in_launch_its_ranks_and_what_these_start(launcher, ways, ignored):
    process = launcher.begin(LOOK, *ways, ignored=ignored, clocks=PATIENT)
    process.send_signal(ignored[0])
    for text in written(launcher, "ready"):
        own, childs, servers = text.split("|")
        assert own == childs == ignored[0].name
        assert ignored[0].name in servers.split()
    time.sleep(0.3)
    assert process.poll() is None
    # SIGTERM still ends all, in order.
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, err
    assert err.endswith("launch: SIGTERM: ending 2 ranks\n")
    assert {"cleaned-0", "cleaned-1"} <= set(os.listdir(launcher.folder))
    assert launcher.gone(within=0.5)


@SPAWNED_IN_LONG
def test_an_ignored_signal_for_the_program(launcher, launch_options):
    """USR1 that launch ignores does not end ranks that do not expect it, nor after the fork server started anew."""
    launcher.write("site-packages/broken.py", "raise ValueError")
    path = {"PYTHONPATH": str(launcher.folder / "site-packages")}
    program = "try: import broken\nexcept ValueError: pass\n" + LOOK
    process = launcher.begin(program, *launch_options, ignored=(signal.SIGUSR1,), **path)
    assert {text.split("|")[0] for text in written(launcher, "ready")} == {"SIGUSR1"}
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.terminate()
    assert process.communicate(timeout=PATIENCE)[1] == "launch: SIGTERM: ending 2 ranks\n"


@SPAWNED_IN_LONG
def test_sigterm_with_grace_to_save(launcher, launch_options):
    process = launcher.begin(SAVES, *launch_options, "--grace", "80", "--retries", "3")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (143, "launch: SIGTERM: ending 2 ranks\n")
    assert written(launcher, "saved") == ["", ""]
    assert launcher.gone(within=0.5)


def test_a_failure_beside_a_rank_that_has_saved_is_the_cause(launcher):
    """Exit code 75 is that of a run that a signal has stopped once it was saved, and no failure."""
    fails = (
        "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(75)\ntime.sleep(0.5)\nraise OSError('no file')"
    )
    done = launcher.run("-n", "2", "python3", "-c", fails)
    assert done.returncode == 1
    assert "OSError: no file" in done.stderr
    assert "its state is saved" not in done.stderr
