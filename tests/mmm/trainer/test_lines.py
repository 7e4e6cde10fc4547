"""A row's line fits 120 columns, whatever a trainer logs; and what a run says at its end."""

import re
import time
from pathlib import Path

import pytest

from mmm.run.lines import HEAD, WIDTH, done, row_line, used
from mmm.run.rows import Row, Totals

# Seconds of a step and of its parts.
TIMES = {"dt": 0.483317, "dtd": 0.00092, "dtf": 0.18197, "dtb": 0.299444, "dto": 0.000983}
# What a line of the log has besides, if there is room.
MORE = {"lr": 0.003, "grad_norm": 1.23456, "sps": 33.104, "tps": 4237.31, "sps_per_gpu": 8.276, "tps_per_gpu": 1059.3}


def row(step=119, **more):
    return {"iter": step, "loss": 2.613306, **TIMES, **MORE, **more}


def test_the_line_of_the_main_example():
    line = row_line(row(), "fsdp_tp", 120, 240.4)
    assert line == "iter=119/120 loss=2.6133 dt=0.483 dtf=0.182 dtb=0.299 tps=4237 left=4m"
    assert HEAD + len("fsdp_tp") + len(line) == WIDTH
    assert row_line(row(), "lm").startswith("iter=119 loss=2.6133 dt=0.483 dtf=0.182 dtb=0.299 ")


@pytest.mark.parametrize("step", [0, 12345])
@pytest.mark.parametrize("more", [{}, {"val_loss": 2.42, "val_bpb": 3.5, "mfu": 0.41}], ids=["plain", "validated"])
@pytest.mark.parametrize("program", ["lm", "context_parallel"])
def test_no_line_is_longer(step, more, program):
    line = row_line(row(step, **more), program, 20000, 36000)
    assert HEAD + len(program) + len(line) <= WIDTH
    for name in ("iter", "loss", "tps", *(["val_loss"] if more else ["dt"])):
        assert f"{name}=" in line
    assert ("dtf=" in line) == ("dtb=" in line)


def test_what_is_always_there():
    """Columns of a program's own; steps that were skipped, where there are; a rate."""
    line = row_line(row(imbalance=1.25, skipped=0, stage=1), "x" * 60, 20000, 36000)
    assert " imbalance=1.25 stage=1" in line
    assert "skipped" not in line
    assert " skipped=3 " in row_line(row(skipped=3), "lm", 5, 1)
    vision = {"epoch": 1, "train_loss": 0.5, "test_loss": 0.4, "test_acc": 91.25, "dt": 3.0, "sps": 512.4}
    assert row_line(vision, "cnn", 3) == "epoch=1/3 train_loss=0.5000 test_loss=0.4000 test_acc=91.2 dt=3.00 sps=512"


def totals(*steps, first=0):
    so_far = Totals(first=first)
    for step, dt in steps:
        so_far.add(Row({"iter": step}, 1.0, 4, 8, {"iter": step, "loss": 2.5, "val_loss": 3.5, "dt": dt}))
    return so_far


def test_totals():
    so_far = totals((0, 10.0), (3, 1.0), (6, 2.0))
    # Of rows that stand for 1, 3 and 3 steps.
    assert so_far.rates() == {"sps": 28 / 19, "tps": 56 / 19}
    # The first row, which starts what is slow to start, is not in it.
    assert so_far.left(10) == 3 * 1.5
    assert totals((0, 10.0)).left(10) is None
    assert so_far.left(None) is None
    assert so_far.left(7) is None
    assert Totals().rates() == {}


def test_what_a_run_says_at_its_end():
    expected = (
        "done: 7 steps; 1.5 min since the start, 19.0 s in steps, 3 tokens/s on average; loss 2.5000, val_loss 3.5000"
    )
    assert done(totals((0, 10.0), (3, 1.0), (6, 2.0)), 90.0) == expected


def test_what_a_run_says_that_goes_on():
    """Seconds and rates are of the steps that this process has made, and so is their number."""
    so_far = totals((9, 1.0), (11, 2.0), first=6)
    # Rows of 4 and 2 steps.
    assert so_far.rates() == {"sps": 24 / 8, "tps": 48 / 8}
    assert done(so_far, 90.0).startswith("done: 6 steps, 12 with those before; 1.5 min since the start, 8.0 s in steps")


def test_what_a_process_has_used():
    """Its CPU time and its largest memory, next to Python's own clock and what Linux says (VmHWM, in KiB)."""
    before = time.process_time()
    match = re.search(r"([\d.]+) (s|min|h) of CPU time, at most ([\d.]+) (MiB|GiB) of memory", used())
    seconds = float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
    assert 0.9 * before - 0.1 <= seconds <= 1.1 * time.process_time() + 0.1
    memory = float(match[3]) * {"MiB": 1, "GiB": 1024}[match[4]]
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert memory == pytest.approx(int(line.split()[1]) / 1024, rel=0.1)
