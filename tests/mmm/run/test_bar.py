"""The bar of a terminal: it is nowhere else, cuts no line, and names the rank that others wait for."""

import io
import re
import time
from collections import Counter
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
from support.pool import program_on

# A line that no terminal of this width has room for.
LONG_LINE = "one " * 60 + "end"
HIDE_CURSOR = "\x1b[?25l"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed_by(rank, out, folder, seconds, steps=3):
    """What a run prints to `out`, in which each step lasts `seconds` of this rank and the last row has a long line."""
    config = groups.RunFlags(device="cpu", outdir=folder)
    with program_on(rank), redirect_stdout(out), start_run("small", config, Layout().fit(rank.world_size)) as run:
        for step in run.steps(torch.ones(steps), steps, samples=rank.world_size):
            time.sleep(seconds)
            total = step.batch.clone()
            dist.all_reduce(total)
            step.log(step.batch)
        run.log.info(LONG_LINE)
    return out.getvalue()


def on_a_terminal(rank, folder, seconds=1.0, kind="xterm"):
    with patch.multiple(bar, SHORT=0.1, LONG=0.2, PAUSE=0.05), patch.dict("os.environ", TERM=kind, COLUMNS="80"):
        return printed_by(rank, Terminal(), folder, seconds * rank.rank)


def test_a_bar_names_the_rank_behind_and_leaves_lines_and_cursor_as_they_are(run_on_ranks, tmp_path):
    """A bar that wraps lines, hides the cursor of a rank that may be killed, or blames the rank that waits."""
    out = run_on_ranks(on_a_terminal, 2, tmp_path / "out")[0]
    assert out.count("iter=") == 3
    assert LONG_LINE in out
    assert HIDE_CURSOR not in out
    # In one of the steps after the first: on a busy host the bar may miss some. The loss is the sum of both ones.
    assert re.search(r"[12]/3 steps .*loss 2\.0000  left \d+s  this step \d+s  behind", out)
    # Now and then rank 1 does wait for rank 0, which prints the lines.
    named = Counter(re.findall(r"behind: (ranks? [\d-]+)", out))
    assert named.most_common(1)[0][0] == "rank 1", named


def into_a_file(rank, folder):
    # Some CI systems set it for colours in their logs.
    with patch.dict("os.environ", FORCE_COLOR="1"):
        return printed_by(rank, io.StringIO(), folder, seconds=0)


def on_a_dumb_terminal(rank, folder):
    return on_a_terminal(rank, folder, 0, "dumb")


@pytest.mark.parametrize("where", [into_a_file, on_a_dumb_terminal])
def test_where_no_bar_can_be_there_are_lines_alone(run_on_ranks, tmp_path, where):
    """A bar in a file, a job or a notebook would be a heap of escapes."""
    out = run_on_ranks(where, 2, tmp_path / "out")[0]
    lines = out.splitlines()
    assert sum("iter=" in line for line in lines) == 3
    assert any(line.endswith(LONG_LINE) for line in lines)
    assert "\x1b" not in out
    assert "/3 steps " not in out
