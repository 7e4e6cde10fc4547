"""`launch --elastic` on real launcher backends: a host that is cut off, a rank that is killed."""

import os
import signal

import pytest

from support.clock import PATIENCE

PROGRAM = """
import os, socket, time
rank, attempt = os.environ["RANK"], os.environ["MMM_ATTEMPT"]
host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
open(f"on-{attempt}-{rank}", "w").write(host)
open(f"pid-{attempt}-{rank}", "w").write(str(os.getpid()))
time.sleep(200 if attempt == "0" else 0)
"""


def second(launcher):
    """The hosts of the second attempt's ranks."""
    return [path.read_text() for path in sorted(launcher.folder.glob("on-1-*"))]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_host_is_cut_off(launcher, two_hosts, mpi):
    launcher.prefix = two_hosts.start_words()
    launcher.write("t.py", PROGRAM)
    words = ["--elastic", "2:4", *two_hosts.options(mpi), "--device", "cpu", "python3", "t.py"]
    process = launcher.start(*words, **two_hosts.variables)
    launcher.wait_for(*(f"pid-0-{rank}" for rank in range(4)))
    two_hosts.cut()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, second(launcher)) == (0, ["mmmA", "mmmA"]), err
    assert "launch: lost ranks 2, 3 on mmmB" in err
    assert launcher.gone(within=10.0)


def test_slurm(launcher, slurm):
    job, variables = slurm.allocate()
    launcher.write("t.py", PROGRAM)
    try:
        process = launcher.start("--elastic", "2:4", "--device", "cpu", "python3", "t.py", **variables)
        launcher.wait_for(*(f"pid-0-{rank}" for rank in range(4)))
        os.kill(int((launcher.folder / "pid-0-3").read_text()), signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        slurm.run("scancel", job)
    assert (process.returncode, second(launcher)) == (0, ["n1", "n1", "n2"]), err
    assert launcher.gone(within=10.0)
