"""The progress bar: on a terminal only, below the log; also where launch copies what ranks write."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from mmm.runtime.ranks import Rank
from mmm.trainer.loop.progress import StepsBar

RUN = ["-m", "mmm.trainer.lm", "--preset", "debug", "--seq_length", "16", "--batch_size", "2", "--max_iters", "4"]
RUN += ["--device", "cpu", "--no-plots", "--eval_batches", "1"]
LAUNCH = [sys.executable, "-m", "mmm_launch", "-n", "2", "--device", "cpu"]
ROW = re.compile(r"iter=(\d)/4 loss=\S+ .* tps=\d+\b")


def on_terminal(command, env):
    """What a program writes to a terminal of 80 columns."""
    reader, writer = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    written = []

    def read():
        try:
            while data := os.read(reader, 1 << 16):
                written.append(data)
        except OSError:  # the last writer has gone
            pass

    thread = threading.Thread(target=read)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=env)
    os.close(writer)
    thread.start()
    assert process.wait(timeout=120) == 0
    thread.join(timeout=30)
    os.close(reader)
    return b"".join(written).decode()


@pytest.fixture
def env(tmp_path):
    return {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}


@pytest.mark.long
@pytest.mark.parametrize("launched", [["--"], ["--timeout", "100", "--"]], ids=["inherited", "copied by launch"])
def test_the_bar_is_below_whole_log_lines(launched, env, tmp_path):
    text = on_terminal([*LAUNCH, *launched, "python3", *RUN, "--outdir", str(tmp_path)], env)
    assert re.search(r"step\S* +\S*4/4", re.sub(r"\x1b\[[0-9;]*m", "", text)), text[-3000:]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    assert [found.group(1) for found in map(ROW.search, plain.split("\n")) if found] == ["0", "1", "2", "3"]
    assert "/s" in plain.partition("iter=0")[2]
    log = (tmp_path / "log.txt").read_text()
    assert "\x1b" not in log
    assert len(ROW.findall(log)) == 4


def test_no_bar_without_a_terminal(capsys):
    with StepsBar(Rank(0, 1, 0, 1, "alone")) as bar:
        assert list(bar.over(range(3))) == [0, 1, 2]
        bar.row(1.0, 2.0)
    assert (*capsys.readouterr(),) == ("", "")
