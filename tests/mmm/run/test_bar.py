"""The bar of a terminal: it is nowhere else, cuts no line, and names the rank that others wait for."""

import io
import re
import time
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import mmm.run.standard  # noqa: F401  # before `program_on` looks for it
from mmm.parallel import Layout
from mmm.run import options as groups
from mmm.run.hooks import bar
from mmm.trainer import start_run
from support.clock import PATIENCE, stretched
from support.pool import program_on

# A line that no terminal of this width has room for.
LONG_LINE = "one " * 60 + "end"
HIDE_CURSOR = "\x1b[?25l"


# The bar in the last of three steps: the first gives no pace. The loss is the sum of both ones.
NAMED = re.compile(r"2/3 steps .*loss 2\.0000  left \d+s  this step \d+s  behind: rank 1")


class Terminal(io.StringIO):
    """A terminal that makes the file `seen` as soon as the bar names rank 1."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def isatty(self):
        return True

    def write(self, text):
        if NAMED.search(text):
            self.seen.touch()
        return super().write(text)


def no_wait(step):
    pass


def printed_by(rank, out, folder, wait=no_wait, steps=3):
    """What a run prints to `out`, in which this rank calls `wait` in each step and the last row has a long line."""
    config = groups.RunFlags(device="cpu", outdir=folder)
    with program_on(rank), redirect_stdout(out), start_run("small", config, Layout().fit(rank.world_size)) as run:
        for step in run.steps(torch.ones(steps), steps, samples=rank.world_size):
            wait(step)
            total = step.batch.clone()
            dist.all_reduce(total)
            step.log(step.batch)
        run.log.info(LONG_LINE)
    return out.getvalue()


def on_a_terminal(rank, folder, kind="xterm", wait=no_wait):
    seen = folder.parent / "seen"
    with patch.multiple(bar, SHORT=0.1, LONG=0.2, PAUSE=0.05), patch.dict("os.environ", TERM=kind, COLUMNS="80"):
        return printed_by(rank, Terminal(seen), folder, wait)


def where_rank_1_is_slow(rank, folder):
    """In the last step rank 1 computes until the bar of rank 0 names it, however slow this host is."""

    def wait(step):
        deadline = time.monotonic() + stretched(30)
        is_slow = rank.rank == 1 and step.index == 2
        while is_slow and not (folder.parent / "seen").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    return on_a_terminal(rank, folder, wait=wait)


def test_a_bar_names_the_rank_behind_and_leaves_lines_and_cursor_as_they_are(run_on_ranks, tmp_path):
    """A bar that wraps lines, hides the cursor of a rank that may be killed, or blames the rank that waits."""
    out = run_on_ranks(where_rank_1_is_slow, 2, tmp_path / "out", timeout=PATIENCE)[0]
    assert out.count("iter=") == 3
    assert LONG_LINE in out
    assert HIDE_CURSOR not in out
    assert NAMED.search(out)


def into_a_file(rank, folder):
    # Some CI systems set it for colours in their logs.
    with patch.dict("os.environ", FORCE_COLOR="1"):
        return printed_by(rank, io.StringIO(), folder)


def on_a_dumb_terminal(rank, folder):
    return on_a_terminal(rank, folder, "dumb")


@pytest.mark.parametrize("where", [into_a_file, on_a_dumb_terminal])
def test_where_no_bar_can_be_there_are_lines_alone(run_on_ranks, tmp_path, where):
    """A bar in a file, a job or a notebook would be a heap of escapes."""
    out = run_on_ranks(where, 2, tmp_path / "out")[0]
    lines = out.splitlines()
    assert sum("iter=" in line for line in lines) == 3
    assert any(line.endswith(LONG_LINE) for line in lines)
    assert "\x1b" not in out
    assert "/3 steps " not in out
