"""A launched run that is killed, or stopped by a signal, and that `launch --retries` takes up again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mmm.history
from mmm.history.record.dataset import marks_of
from mmm_launch.contract import REPEAT
from support.clock import PATIENCE
from support.launcher import Launcher
from support.resuming import curve, tensors
from support.signals import as_from_a_terminal

RUN = "-m mmm.trainer.lm --preset debug --dataset random --seq_length 16 --global_batch_size 8 --device cpu"
STEPS = [
    "--eval_every",
    "0",
    "--max_iters",
    "120",
    "--checkpoint_every",
    "10",
    "--no-plots",
    "--flush_every",
    "7",
    "--outdir",
]


@pytest.fixture
def launcher(tmp_path):
    made = Launcher(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()


# Launched with one retry.
LINE = ["-n", "2", "--device", "cpu", "--retries", "1", "python3", *RUN.split(), *STEPS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing ends."""
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    assert launcher.run(*LINE, "one").returncode == 0
    return launcher.folder / "one"


@pytest.mark.long
@pytest.mark.parametrize("code", [signal.SIGKILL, signal.SIGUSR1])
def test_retries_go_on(launcher, undisturbed, code):
    process = launcher.start(*LINE, "two")
    launcher.wait_for("two/checkpoints/step-20")
    pids = [rank["pid"] for rank in json.loads((launcher.folder / "two/config.json").read_text())["ranks"]]
    os.kill(pids[1], code)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    assert len(re.findall(r"launch: exit code \d+: starting again", err)) == 1
    two = launcher.folder / "two"
    assert curve(undisturbed) == curve(two)
    assert len(curve(two)) == 120
    a, b = (tensors(folder / "checkpoints/step-120") for folder in (undisturbed, two))
    for name in a:
        assert a[name].equal(b[name])
    (mark,) = marks_of(mmm.history.load(two))
    assert mark["step"] >= 20
    assert not list(Path(two).glob("attempt-*"))


CTRL_C = """
import os, time
from mmm.run.command_line import run_main
from mmm.trainer import lm
from mmm.run import run as loop
from mmm.run.command_line import parse

def seed_step(seed, step, coordinate, real=loop.seed_step):
    if step == 2 and not os.path.exists("again"):
        open("at-" + os.environ.get("RANK", "0"), "w").close()
        time.sleep(SLEEP)
    real(seed, step, coordinate)

loop.seed_step = seed_step
run_main(lambda: lm.train(parse(lm.Config, "")))
"""
INTERRUPTED = "--preset debug --dataset random --seq_length 16 --global_batch_size 8 --device cpu --eval_every 0 "
INTERRUPTED += "--max_iters 4 --no-plots --outdir run"


def started(launcher, way, sleep, flags=INTERRUPTED):
    """A run whose third step takes `sleep` seconds, in that step."""
    (launcher.folder / "slow.py").write_text(CTRL_C.replace("SLEEP", str(sleep)))
    argv = ["slow.py", *flags.split()]
    ranks = 1 if way == "alone" else 2
    if way == "alone":
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=launcher.folder,
            env=launcher.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=as_from_a_terminal(),
        )
        launcher.process = process
    else:
        hosts = launcher.on_hosts() if way == "hosts" else []
        process = launcher.start(*hosts, "-n", "2", "--device", "cpu", "python3", *argv)
    launcher.wait_for(*(f"at-{rank}" for rank in range(ranks)))
    # The files are closed by now: what a signal raises while one is freed, Python forgets.
    time.sleep(0.2)
    return process


LONG_HOW = [pytest.param(way, marks=pytest.mark.long) for way in ("alone", "hosts")]
ALONE_LAUNCHED = pytest.mark.parametrize("way", [*LONG_HOW, "launch"])


@pytest.mark.long
@ALONE_LAUNCHED
def test_ctrl_c_saves(launcher, way):
    """The step takes longer than launch gives ranks that save nothing."""
    process = started(launcher, way, 1.5, f"{INTERRUPTED} --checkpoint_every 100")
    os.killpg(process.pid, signal.SIGINT) if way == "alone" else process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == (75 if way == "alone" else 130), out + err
    expected = "Ctrl-C again ends it at once" if way == "alone" else "once they have saved (Ctrl-C again: at once)"
    assert err.count(expected) == 1
    assert (
        "stopped by a signal after 3 steps, and saved: the same command with --resume auto continues from there" in out
    )
    assert os.listdir(launcher.folder / "run/checkpoints") == ["step-3"]
    assert mmm.history.load(launcher.folder / "run").attrs["state"] == "interrupted"


@pytest.mark.long
@ALONE_LAUNCHED
def test_a_second_ctrl_c_ends_at_once(launcher, way):
    process = started(launcher, way, 2 * PATIENCE, f"{INTERRUPTED} --checkpoint_every 100")
    process.send_signal(signal.SIGINT)
    time.sleep(2 * REPEAT)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == (-signal.SIGINT if way == "alone" else 130), out + err
    assert not list(launcher.folder.glob("run/checkpoints/step-*"))


@pytest.mark.long
@ALONE_LAUNCHED
def test_ctrl_c_without_checkpoints_ends_as_any_program(launcher, way):
    process = started(launcher, way, 2 * PATIENCE)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == (-signal.SIGINT if way == "alone" else 130), out + err
    assert err.count("Traceback") == (way == "alone")
