"""A rank that fails ends all, and is the one that is spoken of."""

import os
import signal
import time

import pytest

from support.clock import PATIENCE
from support.launcher import SPAWNED_IN_LONG

SOON = 30.0  # s: at once, on a machine with ten times the work that it has cores for
PATIENT = {"GRACE": 80.0}  # s: nothing that ends SOON has waited for it


@pytest.fixture
def fail(launcher):
    """Runs a program in which rank 1 does `action` and the others wait, and sees that all ends in time."""

    def run(action, others="[time.sleep(0.05) for _ in range(1800)]", ranks=3, how=(), clocks=PATIENT):
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
        done = launcher.run(*how, "-n", str(ranks), "python3", "t.py", timeout=PATIENCE, clocks=clocks)
        took = time.time() - float((launcher.folder / "failed").read_text())
        assert launcher.gone(within=0.1), "processes are left"
        assert took < SOON, f"the end took {took:.2f} s"
        return done

    return run


def test_an_exception(fail, how):
    done = fail("raise RuntimeError('boom')", how=how)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("RuntimeError: boom") == 1
    assert "launch: rank 1 failed on " in done.stderr
    assert "in work\n    raise RuntimeError" in done.stderr
    assert "runpy" not in done.stderr
    assert "mmm/runtime" not in done.stderr


@SPAWNED_IN_LONG
def test_an_exit_code(fail, how):
    done = fail("sys.exit(3)", how=how)
    assert (done.returncode, done.stderr) == (3, "launch: rank 1 exited with code 3\n")


@SPAWNED_IN_LONG
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_death_by_a_signal(fail, how, name):
    done = fail(f"os.kill(os.getpid(), signal.{name})", how=how)
    assert done.returncode == 128 + getattr(signal, name)
    assert "launch: rank 1 (pid " in done.stderr
    assert f"was killed by {name} on {os.uname().nodename}" in done.stderr
    assert "Traceback" not in done.stderr


@SPAWNED_IN_LONG
def test_a_users_error(fail, how):
    done = fail("raise ConfigError('--lr is 0; give a positive number')", how=how)
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
    others = """
    while not os.path.exists("failed"): time.sleep(0.01)
    try: [time.sleep(0.05) for _ in range(1800)] if rank == 0 else time.sleep(0.02)
    finally: raise RuntimeError('[../gloo/transport/tcp/pair.cc:534] Connection closed by peer')
""".strip()
    done = fail("os.kill(os.getpid(), signal.SIGKILL)", others)
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


def test_a_syntax_error(launcher, how):
    launcher.write("t.py", "def (:\n")
    done = launcher.run(*how, "-n", "2", "python3", "t.py")
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
    launcher.write(
        "exit.py", "from mmm.runtime.failure import print_once\nwith print_once(): raise SystemExit('no lr')"
    )
    assert launcher.run("-n", "3", "python3", "exit.py").stderr == "no lr\n"
    good = launcher.run("-n", "3", "python3", "t.py", "--help")
    assert (good.returncode, good.stdout.count("usage")) == (0, 1)
    assert launcher.run("-n", "2", "python3", "t.py", "--lr", "1").stdout == "1.0\n1.0\n"
