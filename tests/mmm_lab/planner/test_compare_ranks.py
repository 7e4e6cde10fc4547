"""Ranks that part at 1,024: each planted fault is named by running a few of them, and a sound script is not accused."""

import re
from pathlib import Path

import pytest

from mmm_lab.cli import main as cli
from mmm_lab.planner.rank_numbers import Alike

SCRIPT = """
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mmm.parallel import Layout, Plan, Replicated
from mmm.run import options
from mmm.trainer import build_model, run_main, start_run, whoami


@dataclass(frozen=True, kw_only=True)
class Config:
    run: options.RunFlags = options.RunFlags(device="cpu")


def main():
    rank = whoami().rank
    layout = Layout(tp=2).fit(whoami().world_size)
    steps = 3
    PLACE_BEFORE
    with start_run("parting", Config(), layout) as run:
        plan = Plan({"0": Replicated(), "1": Replicated()}, fsdp_units=())
        model = build_model(run, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps([torch.ones(2, 4)] * steps, steps, samples=1024):
            PLACE_INSIDE
            loss = model(step.batch).sum()
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run_main(main)
"""


def compared(monkeypatch, tmp_path, capsys, before="pass", inside="pass"):
    """Exit code and last lines of a comparison of 1,024 ranks of the script with lines put in."""
    monkeypatch.chdir(tmp_path)
    Path("parting.py").write_text(SCRIPT.replace("PLACE_BEFORE", before).replace("PLACE_INSIDE", inside))
    code = cli.main(["dry-run", "1024", "--compare", "--", "parting.py"])
    _, _, text = capsys.readouterr().out.partition("compare it with what a device has\n")
    return code, text


@pytest.mark.long
def test_a_sound_script_is_not_accused(monkeypatch, tmp_path, capsys):
    """It treats rank 0, the last half and every second rank in ways of their own, and makes the same calls."""
    before = "half = 'first' if rank < 512 else 'second'; odd = rank % 2 == 1; main = rank == 0"
    code, text = compared(monkeypatch, tmp_path, capsys, before=before)
    assert code == 0, text
    tried = re.match(r"compared: ranks ([\d, ]+?) stand for all 1,024; rank 0 makes \d+ calls", text)
    assert tried, text
    # One of each of the five kinds at least.
    assert {"0", "1", "2", "512", "513"} <= set(tried[1].split(", "))


# Where → the line, and what has to be named.
FAULTS = {
    "a seed above the end of uint32": (
        "before",
        "np.random.seed(7 + 20_000_000 * rank)",
        ["rank 215", "1,023", "Seed"],
    ),
    "a barrier on one rank": ("inside", "if rank == 1000: dist.barrier()", ["rank 1,000", "barrier", "parting.py:29"]),
    "a step less on the last ranks": ("before", "steps -= rank >= 1020", ["rank 1,020", "no call any more"]),
    "another group on the second half": (
        "inside",
        "group = dist.new_group(range(512) if rank < 512 else range(512, 1024))",
        ["rank 512", "new_group", "from 512 to 1023"],
    ),
    "another size on some ranks": (
        "inside",
        "dist.all_reduce(torch.ones(1 + (rank // 8 == 5)))",
        ["rank 40", "all_reduce of 8 bytes", "parting.py:29"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_parts_is_named(monkeypatch, tmp_path, capsys, fault):
    """Rank 0 alone, as a plain dry run tries it, comes through with each of them."""
    place, line, named = FAULTS[fault]
    code, text = compared(monkeypatch, tmp_path, capsys, **{place: line})
    assert code == 1, text
    for fragment in named:
        assert fragment in text


def test_numbers_know_what_they_are_on_other_ranks():
    """Against Python's integers, rank by rank."""
    alike = Alike(rank=3, world_size=50)
    rank = alike.number(range(50))
    quotient, remainder = divmod(rank, 8)
    for computed, by_hand in (
        (2 * rank + 1, lambda r: 2 * r + 1),
        (100 - rank, lambda r: 100 - r),
        (quotient * 8 + remainder, lambda r: r),
        (rank ^ 1, lambda r: r ^ 1),
        (-rank, lambda r: -r),
    ):
        assert computed == by_hand(3)
        assert list(computed.values) == [by_hand(r) for r in range(50)]


@pytest.mark.parametrize(
    ("compare", "same"),
    [
        (lambda rank: rank == 40, lambda r: r != 40),
        (lambda rank: rank + 2 > 8, lambda r: r + 2 <= 8),
        (lambda rank: bool(rank % 3), lambda r: r % 3 == 0),
        (lambda rank: rank in (5, 7), lambda r: r not in (5, 7)),
        # A seed that is no longer an int32.
        (lambda rank: 100_000_000 * rank, lambda r: 100_000_000 * r < 2**31),
        # An error on rank 10 alone.
        (lambda rank: 7 // (rank - 10), lambda r: r != 10),
    ],
)
def test_ranks_part_where_a_comparison_has_another_outcome(compare, same):
    alike = Alike(rank=3, world_size=50)
    compare(alike.number(range(50)))
    assert alike.alike.tolist() == [same(r) for r in range(50)]
