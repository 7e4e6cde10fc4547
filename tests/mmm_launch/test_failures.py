"""A rank that fails, or does not come to a collective, ends all, and is the one that is spoken of; which of several
failures is the cause."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mmm_launch import contract
from mmm_launch.channel.failures import Failure, cause
from mmm_launch.contract import Report
from mmm_verify.testing import free_port
from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG

# s: at once, on a machine with ten times the work that it has cores for
SOON = 30.0
# s: nothing that ends SOON has waited for it
PATIENT = {"GRACE": 80.0}


@pytest.fixture
def fail(launcher):
    """Runs a program in which rank 1 does `action` and the others wait, and sees that all ends in time."""

    def run(action, others="[time.sleep(0.05) for _ in range(1800)]", ranks=3, launch_options=(), clocks=PATIENT):
        launcher.write(
            "t.py",
            f"""
import os, signal, sys, time
from mmm.errors import ConfigError
rank = int(os.environ["RANK"])
def work():
    if rank == 1:
        while len([n for n in os.listdir() if n.startswith("ready")]) < {ranks} - 1: time.sleep(0.01)
        open("failed", "w").write(str(time.time()))
        {action}
    open(f"ready-{{rank}}", "w").close()
    {others}
work()
""",
        )
        done = launcher.run(*launch_options, "-n", str(ranks), "python3", "t.py", timeout=PATIENCE, clocks=clocks)
        took = time.time() - float((launcher.folder / "failed").read_text())
        assert launcher.gone(within=0.1), "processes are left"
        assert took < SOON, f"the end took {took:.2f} s"
        return done

    return run


def test_an_exception(fail, launch_options):
    done = fail("raise RuntimeError('boom')", launch_options=launch_options)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("RuntimeError: boom") == 1
    assert "launch: rank 1 failed on " in done.stderr
    assert "in work\n    raise RuntimeError" in done.stderr
    assert "runpy" not in done.stderr
    assert "mmm/runtime" not in done.stderr


@SPAWNED_IN_LONG
def test_an_exit_code(fail, launch_options):
    done = fail("sys.exit(3)", launch_options=launch_options)
    assert (done.returncode, done.stderr) == (3, "launch: rank 1 exited with code 3\n")


@SPAWNED_IN_LONG
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_death_by_a_signal(fail, launch_options, name):
    done = fail(f"os.kill(os.getpid(), signal.{name})", launch_options=launch_options)
    assert done.returncode == 128 + getattr(signal, name)
    assert "launch: rank 1 (pid " in done.stderr
    assert f"was killed by {name} on {os.uname().nodename}" in done.stderr
    assert "Traceback" not in done.stderr


@SPAWNED_IN_LONG
def test_a_users_error(fail, launch_options):
    done = fail("raise ConfigError('--lr is 0; give a positive number')", launch_options=launch_options)
    assert (done.returncode, done.stderr) == (2, "error: --lr is 0; give a positive number\n")


def test_a_users_error_of_every_rank_is_said_once(launcher):
    launcher.write(
        "t.py",
        "from mmm.runtime.failure import run_main\nfrom mmm.errors import LayoutError\n"
        "def main():\n    raise LayoutError('3 ranks, tp 2')\nrun_main(main)\n",
    )
    for _ in range(3):
        done = launcher.run("-n", "3", "python3", "t.py")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: 3 ranks, tp 2\n")


def test_a_users_error_of_a_rank_that_then_hangs(fail):
    done = fail(
        "sys.modules['threading'] = __import__('threading'); __import__('threading').Thread("
        "target=time.sleep, args=(90,)).start(); raise ConfigError('stuck')",
        clocks=None,
    )
    assert (done.returncode, done.stderr) == (2, "error: stuck\n")


def test_what_others_say_in_consequence_is_left_out(fail):
    # Rank 2 speaks once rank 1 is gone, however long a busy machine takes for that: then the link leads nowhere.
    others = """
    while not os.path.lexists("dying") or os.path.exists("dying"): time.sleep(0.01)
    try: [time.sleep(0.05) for _ in range(1800 * (rank == 0))]
    finally: raise RuntimeError('[../gloo/transport/tcp/pair.cc:534] Connection closed by peer')
""".strip()
    done = fail("os.symlink(f'/proc/{os.getpid()}', 'dying'); os.kill(os.getpid(), signal.SIGKILL)", others)
    assert done.returncode == 137
    assert done.stderr.count("Traceback") == 0
    assert "rank 1 (pid " in done.stderr


@pytest.mark.long
def test_ranks_that_do_not_listen_are_killed(fail):
    done = fail(
        "raise ValueError('first')",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); [time.sleep(0.05) for _ in range(1800)]",
        clocks=None,
    )
    assert done.returncode == 1
    assert "ValueError: first" in done.stderr


def test_ranks_that_are_ended_may_clean_up(launcher, fail):
    done = fail(
        "raise ValueError('first')",
        "\n    try: [time.sleep(0.05) for _ in range(1800)]\n    finally: open(f'cleaned-{rank}', 'w')",
    )
    assert done.stderr.count("Traceback") == 1
    assert {"cleaned-0", "cleaned-2"} <= set(os.listdir(launcher.folder))


def test_a_syntax_error(launcher, launch_options):
    launcher.write("t.py", "def (:\n")
    done = launcher.run(*launch_options, "-n", "2", "python3", "t.py")
    assert done.returncode == 1
    assert done.stderr.count("SyntaxError") == 1


def test_a_command_lines_help_and_errors_are_said_once(launcher):
    launcher.write(
        "t.py",
        "import argparse\nfrom mmm.runtime.failure import print_once\n"
        "p = argparse.ArgumentParser('t')\np.add_argument('--lr', type=float)\n"
        "with print_once(): args = p.parse_args()\nprint(args.lr)",
    )
    bad = launcher.run("-n", "3", "python3", "t.py", "--lr", "x")
    assert bad.returncode == 2
    assert bad.stderr.count("invalid float value") == bad.stderr.count("usage") == 1
    assert "launch:" not in bad.stderr
    leaves = "from mmm.runtime.failure import print_once\nwith print_once(): raise SystemExit('no lr')"
    assert launcher.run("-n", "3", "python3", "-c", leaves).stderr == "no lr\n"
    good = launcher.run("-n", "3", "python3", "t.py", "--help")
    assert (good.returncode, good.stdout.count("usage")) == (0, 1)
    assert launcher.run("-n", "2", "python3", "t.py", "--lr", "1").stdout == "1.0\n1.0\n"


def reported(report):
    return Failure.reported(report, report.time, "")


# Failures of ranks, of which one is the cause of the others.
BOOM = reported(Report(1, "traceback", "Traceback …\nValueError: boom\n", 1, time=5.0))
LOST = reported(Report(0, "traceback", "Traceback …\nRuntimeError: … Connection closed by peer\n", 1, time=4.0))
USER = reported(Report(2, "user", "Connection refused is what this user's message says", 2, time=6.0))
KILLED = Failure.ended(3, 77, -signal.SIGKILL, 4.5, "")
ABORTED = Failure.ended(0, 78, -signal.SIGABRT, 4.1, "")
LEFT = Failure.ended(2, 79, 3, 7.0, "")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        # Though the lost connection was noticed earlier.
        ([LOST, BOOM], BOOM),
        ([LOST, KILLED], KILLED),
        ([LOST, ABORTED], ABORTED),
        ([ABORTED, BOOM], BOOM),
        # by time
        ([BOOM, KILLED], KILLED),
        ([BOOM, USER], BOOM),
        ([LOST, USER], USER),
        ([LOST, LEFT], LEFT),
        ([LOST], LOST),
    ],
)
def test_the_cause_comes_first(failures, expected):
    assert cause(failures) is expected
    assert cause(failures[::-1]) is expected


def test_exit_codes():
    assert (KILLED.exit_code, ABORTED.exit_code, LEFT.exit_code, USER.exit_code, BOOM.exit_code) == (137, 134, 3, 2, 1)


def test_a_report_survives_the_way():
    report = Report(1, "traceback", "naïve \udcff \n", 1, 2.5)
    assert Report.loads(report.dumps()).text == report.text
    assert len(Report(1, "traceback", "é" * 10**6, 1, 2.5).dumps()) < contract.SOCKET_BUFFER // 4


def test_only_a_rank_that_is_attached_reports(monkeypatch):
    far_end, near_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(contract.SOCKET_VARIABLE, "")
    assert not contract.report("user", "nobody listens", 2)
    contract.attach(near_end.detach())
    before = time.monotonic()
    assert contract.report("user", "too many heads", 2)
    report = Report.loads(far_end.recv(1 << 16))
    assert (report.rank, report.kind, report.text, report.exit_code) == (3, "user", "too many heads", 2)
    assert before <= report.time <= time.monotonic()
    # Not the rank itself: a process that it started.
    if os.fork() == 0:
        os._exit(int(contract.report("user", "from a child", 2)))
    assert os.wait()[1] == 0


def test_shortening_keeps_both_ends():
    text = contract.shorten("a" * 500 + "b" * 500, limit=90)
    assert text.startswith("a" * 30 + "\n")
    assert text.endswith("\n" + "b" * 60)
    assert "910 characters left out" in text
    assert contract.shorten("abc") == "abc"


PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from mmm.torch_private.groups import set_timeout
from mmm.runtime.clock import StepClock
from mmm.runtime.hang import HangWatch
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import whoami
rank, cpu, limit = whoami(), torch.device("cpu"), float(sys.argv[2])
clock = StepClock(cpu, ("dtf", "dto"))
def all_batches(step):
    if step == 3 and rank.rank == int(sys.argv[1]):
        time.sleep(1000)
with process_group(rank, cpu, 100), HangWatch(rank, limit, clock):
    for step in range(5):
        if step == 3:  # once all have come to step 2: also on a busy machine, they are at most a moment apart
            set_timeout(timedelta(seconds=limit), dist.group.WORLD)
        clock.start()
        clock.step = step
        all_batches(step)
        clock.lap("dtf")
        dist.all_reduce(torch.ones(4, 3))
        clock.lap("dto")
"""
HOST = socket.gethostname()


def run(launcher, argv, *started_by, ranks=3):
    """The program, under launch or with nothing but its variables: output, and the exit codes."""
    launcher.write("t.py", PROGRAM)
    if started_by:
        done = launcher.run("-n", str(ranks), "--device", "cpu", "python3", "t.py", *argv)
        return done.stderr, [done.returncode]
    places = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "t.py", *argv],
            cwd=launcher.folder,
            env=launcher.environment(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), **places),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
        return "".join(errors), [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()


@pytest.mark.long
def test_under_launch(launcher):
    text, codes = run(launcher, ["0", "10"], "launch")
    assert text.startswith(f"hang: rank 0 on {HOST} did not reach all_reduce (call 4 of the world group, ranks 0-2, ")
    assert f"  rank 0 ({HOST}): step 3, at " in text
    assert f"  ranks 1-2 ({HOST}): step 3, waiting in all_reduce (call 4 of the world group" in text
    assert len(text.splitlines()) == 3
    assert codes == [1]


@pytest.mark.long
def test_without_launch_every_process_ends(launcher):
    text, codes = run(launcher, ["1", "4"], ranks=2)
    assert text.startswith(f"hang: rank 1 on {HOST} did not reach all_reduce (call 4 of the world group, ranks 0-1, ")
    assert len(text.splitlines()) == 3
    assert codes == [1, 1]
