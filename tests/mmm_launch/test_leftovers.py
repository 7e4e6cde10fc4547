"""No process outlives launch: not when the run ends, not when launch, the fork server or a rank is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmm_launch.run import processes
from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG

# s: at once, on a machine with ten times the work that it has cores for
SOON = 30.0

FAMILY = """
import multiprocessing, os, subprocess, sys, time
def work():
    subprocess.Popen(["sleep", "90"])
    open("worker-" + os.environ["RANK"], "w").write(str(os.getpid()))
    [time.sleep(0.05) for _ in range(1800)]
if __name__ == "__main__":
    rank = os.environ["RANK"]
    multiprocessing.get_context(sys.argv[1]).Process(target=work, daemon=True).start()
    subprocess.Popen(["sleep", "91"])
    subprocess.Popen(["sleep", "92"], start_new_session=True)            # leaves the process group
    while not os.path.exists("worker-" + rank): time.sleep(0.01)
    open("ready-" + rank, "w").write(str(os.getpid()))
    if sys.argv[2] != "wait": os._exit(0)                       # nobody ends the children
    [time.sleep(0.05) for _ in range(1800)]
"""


@pytest.fixture
def family(launcher):
    """Two ranks, each with a worker of each kind, and with processes that these have started."""

    def start(launch_options, kind):
        process = launcher.begin(f"import sys; sys.argv[1:] = ['{kind}', 'wait']\n{FAMILY}", *launch_options)
        # A worker has written before what it starts is itself.
        deadline = time.monotonic() + SOON
        # launch, the fork server, and for each rank: itself, a worker, and three that sleep.
        while len(launcher.alive()) < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(launcher.alive()) >= 12
        return process

    return start


def rank_pid(launcher, rank):
    """The pid that a rank has written; the file is there a moment before what is in it."""
    deadline = time.monotonic() + SOON
    while not (text := (launcher.folder / f"ready-{rank}").read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(text)


def parent(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    # After the name, in brackets: the state, and the parent.
    return int(stat.rpartition(")")[2].split()[1])


@SPAWNED_IN_LONG
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_launch_is_killed(launcher, family, launch_options, start):
    process = family(launch_options, start)
    process.kill()
    assert launcher.gone(within=SOON)
    process.wait()


def test_the_agent_is_killed(launcher, family, launch_options):
    process = family(launch_options, "fork")
    fork_server = parent(rank_pid(launcher, 0))
    assert fork_server != process.pid
    os.kill(fork_server, signal.SIGKILL)
    err = process.communicate(timeout=SOON)[1]
    assert launcher.gone(within=0.1)
    assert process.returncode == 137
    assert f"the process that holds the ranks (pid {fork_server}) was killed by SIGKILL" in err


def test_launch_and_agent_are_killed_at_once(launcher, launch_options):
    process = launcher.begin(
        "import multiprocessing, os, time\n"
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(90,)).start()\n"
        "open('ready-' + os.environ['RANK'], 'w').write(str(os.getpid()))\n[time.sleep(0.05) for _ in range(1800)]\n",
        *launch_options,
    )
    fork_server = parent(rank_pid(launcher, 0))
    # So that it cannot act on the fork server's death.
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(fork_server, signal.SIGKILL)
    process.kill()
    assert launcher.gone(within=SOON)
    process.wait()


@SPAWNED_IN_LONG
def test_a_rank_is_killed(launcher, family, launch_options):
    process = family(launch_options, "fork")
    os.kill(rank_pid(launcher, 1), signal.SIGKILL)
    process.communicate(timeout=SOON)
    assert process.returncode == 137
    assert launcher.gone(within=0.1)


def test_a_run_that_ends_well_leaves_nothing(launcher, launch_options):
    launcher.write("t.py", FAMILY)
    done = launcher.run(*launch_options, "-n", "2", "python3", "t.py", "fork", "leave")
    assert done.returncode == 0
    assert launcher.gone(within=0.1)


def test_what_ignores_sigterm_is_killed():
    argv = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"]
    left = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
    try:
        left.stdout.readline()
        processes.end(left.pid, "-", grace=0.1)
        assert left.wait(SOON) == -signal.SIGKILL
    finally:
        left.kill()
        left.communicate()


def test_data_loader_workers(launcher):
    launcher.write(
        "t.py",
        """
import os, time
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 100
    def __getitem__(self, index):
        open(f"ready-{index}", "w").write(str(os.getpid()))  # 0: of the first worker, 1: of the second
        time.sleep(90 if index else 0)
        return index
batches = iter(DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))  # held: else the workers end
next(batches)
[time.sleep(0.05) for _ in range(1800)]
""",
    )
    process = launcher.start("-n", "1", "python3", "t.py", OMP_NUM_THREADS="1")
    launcher.wait_for("ready-0", "ready-1")
    # launch, fork server, rank, two workers
    assert len(launcher.alive()) == 5
    process.kill()
    assert launcher.gone(within=SOON)
    process.wait()


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts, and network namespaces, need root")
@pytest.mark.parametrize("name", ["a process is killed", "a disk fills", "loopback is lost", "few open files"])
def test_nothing_is_left_and_the_record_is_readable(tmp_path, name):
    command = [sys.executable, str(BENCHMARK), "--faults", "1", "--only", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was wrong" in done.stdout
