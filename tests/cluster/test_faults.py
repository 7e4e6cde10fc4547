"""A rank fails, dies, hangs; launch is told to end, or killed: nothing is left anywhere, and it is said what happened.

On each launcher. The ranks that survive do not heed SIGTERM, so that ending them takes more than asking.
"""

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.clock import PATIENCE, stretched

# S from the fault until no process is left anywhere.
WITHIN = 10.0
FAULTY = """
import os, signal, sys, time
rank, fault = os.environ["RANK"], sys.argv[1]
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
print("rank", rank, "is there", flush=True)
open("ready-" + rank, "w").write(str(os.getpid()))
while not os.path.exists("go"): time.sleep(0.02)
if rank == "3":
    if fault == "exit": sys.exit(3)
    if fault == "raise": raise RuntimeError("rank 3 has had enough")
    if fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        while True: time.sleep(1)
time.sleep(100)
"""
DEAF = "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
CLEANING = FAULTY.replace(DEAF, "").replace(
    "time.sleep(100)",
    "try:\n    open('waits-' + rank, 'w').close()\n    time.sleep(100)\n"
    "finally:\n    time.sleep(0.3)\n    open('cleaned-' + rank, 'w')",
)
TOLD = CLEANING.replace(
    "open('cleaned-' + rank, 'w')",
    "from mmm.runtime.failure import first_failure\n    open('cleaned-' + rank, 'w').write(str(first_failure()))",
)


@dataclass
class Way:
    """How launch is called. `host` is the name of rank 3's host, as launch says it."""

    host: str
    options: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    cluster: object = None
    job: str = ""


@pytest.fixture(params=["mpich", "openmpi", "slurm", "two_hosts-mpich", "two_hosts-openmpi"])
def way(request, launcher):
    kind, _, mpi = request.param.partition("-")
    if kind == "two_hosts":
        two = request.getfixturevalue("two_hosts")
        launcher.prefix = two.start_words()
        yield Way("mmmB", two.options(mpi), two.variables, two)
    elif kind == "slurm":
        slurm = request.getfixturevalue("slurm")
        job, variables = slurm.allocate()
        yield Way("n2", [], variables, slurm, job)
        slurm.run("scancel", job)
        slurm.idle()
    else:
        made = request.getfixturevalue("mpi_of")(kind)
        yield Way(os.uname().nodename, made.options, made.variables)


def start(launcher, way, *argv, program=FAULTY):
    launcher.write("faulty.py", program)
    process = launcher.start(*way.options, "--device", "cpu", *argv, **way.variables)
    launcher.wait_for(*(f"ready-{rank}" for rank in range(4)))
    return process


def end(launcher, process, within=WITHIN):
    """Everything is over in time. Returns exit code and stderr."""
    begin = time.monotonic()
    out, err = process.communicate(timeout=within + 20)
    assert launcher.gone(within=3), "left: " + " ".join(map(str, launcher.alive()))
    took = time.monotonic() - begin
    assert took < stretched(within), f"it took {took:.1f} s\n{err}"
    assert err.count("launch: rank") + err.count("launch: lost") <= 1, err
    assert out.count("is there") == 4
    return process.returncode, err


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("exit", 3, "launch: rank 3 exited with code 3 on {host}\n"),
        ("raise", 1, "launch: rank 3 failed on {host}:\nTraceback"),
        ("kill", 137, "was killed by SIGKILL on {host}\n"),
    ],
)
def test_a_rank_fails(launcher, way, fault, code, says):
    process = start(launcher, way, "python3", "faulty.py", fault)
    launcher.write("go", "")
    result, err = end(launcher, process)
    assert result == code, err
    assert says.format(host=way.host) in err
    if fault == "raise":
        assert err.rstrip().endswith("RuntimeError: rank 3 has had enough")


def test_a_run_hangs(launcher, way):
    process = start(launcher, way, "--timeout", "2", "python3", "faulty.py", "hang")
    launcher.write("go", "")
    result, err = end(launcher, process)
    assert result == 124, err
    assert "launch: no output from any rank for 2 s (--timeout): ending 4 ranks" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_launch_is_told_to_end(launcher, way, signum, code):
    process = start(launcher, way, "python3", "faulty.py", "none")
    process.send_signal(signum)
    result, err = end(launcher, process)
    assert result == code, err
    assert err.rstrip().endswith(f"launch: {signum.name}: ending 4 ranks")


def test_launch_is_killed(launcher, way):
    """Nobody gives orders any more: each host ends its ranks by itself."""
    process = start(launcher, way, "python3", "faulty.py", "none")
    process.kill()
    process.wait()
    left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in launcher.alive()]
    assert launcher.gone(within=stretched(WITHIN)), left
    process.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("way", ["two_hosts-mpich", "two_hosts-openmpi"], indirect=True)
def test_a_host_is_cut_off(launcher, way):
    process = start(launcher, way, "python3", "faulty.py", "none")
    way.cluster.cut()
    result, err = end(launcher, process)
    assert result == 1, err
    assert "launch: lost rank" in err
    assert re.search(r"on mmmB: the connection to launch broke \((no answer for 6 s|No route to host)\)", err), err


@pytest.mark.parametrize("way", ["slurm"], indirect=True)
def test_scancel(launcher, way):
    process = start(launcher, way, "python3", "faulty.py", "none")
    way.cluster.run("scancel", way.job)
    result, err = end(launcher, process)
    assert result == 143, err
    assert "launch: SIGTERM came to the ranks on n" in err
    assert "and not from launch: the scheduler, or srun, ends the run" in err


@pytest.mark.parametrize("way", ["slurm"], indirect=True)
def test_scancel_lets_ranks_end_in_order(launcher, way):
    """Slurm's SIGTERM comes to every process of the step: those between launch and the ranks have to outlive it."""
    process = start(launcher, way, "python3", "faulty.py", "none", program=CLEANING)
    launcher.write("go", "")
    launcher.wait_for(*(f"waits-{rank}" for rank in range(4)))
    way.cluster.run("scancel", way.job)
    result, err = end(launcher, process)
    assert result == 143, err
    assert {f"cleaned-{rank}" for rank in range(4)} <= set(os.listdir(launcher.folder))


@pytest.mark.parametrize("way", ["mpich", "openmpi", "slurm"], indirect=True)
@pytest.mark.parametrize("fault", ["raise", "none"])
def test_the_others_learn_why_they_end(launcher, way, fault):
    process = start(launcher, way, "python3", "faulty.py", fault, program=TOLD)
    launcher.write("go", "")
    if fault == "none":
        launcher.wait_for(*(f"waits-{rank}" for rank in range(4)))
        process.send_signal(signal.SIGTERM)
    end(launcher, process)
    told = {(launcher.folder / f"cleaned-{rank}").read_text() for rank in range(3)}
    assert told == {f"rank 3 on {way.host}: RuntimeError: rank 3 has had enough" if fault == "raise" else "None"}


PROGRAM = """
import os, socket, time
rank, attempt = os.environ["RANK"], os.environ["MMM_ATTEMPT"]
host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
open(f"pid-{attempt}-{rank}", "w").write(str(os.getpid()))
open(f"on-{attempt}-{rank}", "w").write(host)
time.sleep(200 if attempt == "0" else 0)
"""


def second(launcher):
    """The hosts of the second attempt's ranks."""
    return [path.read_text() for path in sorted(launcher.folder.glob("on-1-*"))]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_elastic_on_a_host_that_is_cut_off(launcher, two_hosts, mpi):
    launcher.prefix = two_hosts.start_words()
    launcher.write("t.py", PROGRAM)
    argv = ["--elastic", "2:4", *two_hosts.options(mpi), "--device", "cpu", "python3", "t.py"]
    process = launcher.start(*argv, **two_hosts.variables)
    launcher.wait_for(*(f"on-0-{rank}" for rank in range(4)))
    two_hosts.cut()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, second(launcher)) == (0, ["mmmA", "mmmA"]), err
    assert "launch: lost ranks 2, 3 on mmmB" in err
    assert launcher.gone(within=10.0)


def test_elastic_on_slurm(launcher, slurm):
    job, variables = slurm.allocate()
    launcher.write("t.py", PROGRAM)
    try:
        process = launcher.start("--elastic", "2:4", "--device", "cpu", "python3", "t.py", **variables)
        launcher.wait_for(*(f"on-0-{rank}" for rank in range(4)))
        os.kill(int((launcher.folder / "pid-0-3").read_text()), signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        slurm.run("scancel", job)
    assert (process.returncode, second(launcher)) == (0, ["n1", "n1", "n2"]), err
    assert launcher.gone(within=10.0)


# Plain PyTorch, which knows nothing of launch: it saves each step, and continues from the last. One GPU is bad.
TRAINING = """
import os, socket, sys, time
import torch
import torch.distributed as dist
attempt, host = int(os.environ["MMM_ATTEMPT"]), socket.gethostname()
dist.init_process_group("gloo")
weight, first = torch.zeros(1), 0
if os.path.exists("saved.pt"):
    weight, first = torch.load("saved.pt")
for step in range(first, 4):
    if attempt == 0 and step == 2 and host == "mmmB":
        FAIL
    gradient = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(gradient)
    weight -= gradient
    if dist.get_rank() == 0:
        torch.save((weight, step + 1), "saved.pt")
print("rank", dist.get_rank(), "on", host, "from step", first, "weight", weight.item(), flush=True)
dist.destroy_process_group()
"""
RAISED = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
# It hangs, as a watchdog of NCCL would leave it; the others run into their time-out.
PRINTED = (
    "print('mmmB:7:9 [0] NCCL WARN Cuda failure \"uncorrectable ECC error encountered\"', flush=True); time.sleep(90)"
)


@pytest.mark.parametrize(
    ("mpi", "fails", "options", "code"),
    [("mpich", RAISED, [], 1), ("openmpi", PRINTED, ["--timeout", "15"], 124)],
    ids=["raised", "printed"],
)
def test_a_bad_host_leaves(launcher, two_hosts, mpi, fails, options, code):
    """Each step adds 0 + 1 + 2 + 3 to the weight: after four it is −24 only if each step was made once."""
    launcher.prefix = two_hosts.start_words()
    launcher.write("train.py", TRAINING.replace("FAIL", fails))
    argv = ["--retries", "1", "--spare-hosts", two_hosts.SPARE, *two_hosts.options(mpi), "--device", "cpu", *options]
    done = launcher.run(*argv, "python3", "train.py", **two_hosts.variables)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    hosts = ["mmmA", "mmmA", "mmmC", "mmmC"]
    assert lines == [f"rank {rank} on {host} from step 2 weight -24.0" for rank, host in enumerate(hosts)]
    assert "starting again without mmmB (--retries; 0 left)" in done.stderr
    assert re.search(
        rf"launch: 0 +{code} +mmmB +starting again without mmmB +GPU memory: .*uncorrectable ECC", done.stderr
    )
    assert re.search(r"launch: 1 +0$", done.stderr, re.MULTILINE)
    assert launcher.gone(within=10.0)
