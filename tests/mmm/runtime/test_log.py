"""The log: one format, one line a message, rank 0 unless asked. Default generators: another stream for each
data-parallel coordinate, the same for ranks that share samples."""

import logging
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mmm.run.standard  # noqa: F401  # before `program_on` looks for it
from mmm.parallel import Layout, Plan, Replicated
from mmm.run import options as groups
from mmm.runtime.log import get_logger, logging_to
from mmm.runtime.seed import derived_seed, seed_all, seed_step
from mmm.trainer import build_model, start_run
from support.pool import program_on

LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]\[INFO\]\[test_log:\d+\]( ?\[rank \d\])? - iter=2 loss=10\.783049\n"
)


@pytest.mark.parametrize(("rank", "all_ranks", "lines"), [(0, False, 1), (1, False, 0), (1, True, 1)])
def test_format_and_ranks(capsys, tmp_path, rank, all_ranks, lines):
    with logging_to(rank, tmp_path / "log.txt", all_ranks) as log:
        log.info("iter=2 loss=10.783049")
    out = capsys.readouterr().out
    assert out.count("\n") == lines
    assert not lines or LINE.fullmatch(out)
    assert ("[rank 1]" in out) is (rank == 1 and all_ranks)
    if rank == 0:
        assert (tmp_path / "log.txt").read_text() == out
    else:
        assert not (tmp_path / "log.txt").exists()


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_in_the_file_and_printed_if_asked_for(capsys, tmp_path, verbose):
    with logging_to(0, tmp_path / "log.txt", verbose=verbose) as log:
        log.debug("a detail")
    assert ("a detail" in capsys.readouterr().out) is verbose
    assert "a detail" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("rank", "has_file", "all_ranks", "verbose", "wanted"),
    [
        (0, True, False, False, True),
        (0, False, False, False, False),
        (0, False, False, True, True),
        (1, True, True, False, False),
        (1, True, True, True, True),
        (1, True, False, True, False),
    ],
)
def test_details_are_wanted_only_where_they_are_written(tmp_path, rank, has_file, all_ranks, verbose, wanted):
    file = tmp_path / "log.txt" if has_file else None
    with logging_to(rank, file, all_ranks, verbose) as log:
        assert log.isEnabledFor(logging.DEBUG) is wanted


def test_silent_outside(capsys):
    with logging_to(0):
        pass
    assert get_logger().handlers == []
    get_logger().info("nobody hears this")
    assert capsys.readouterr().out == ""


def test_a_full_disk_ends_the_file_and_not_the_run(capsys):
    with logging_to(0, Path("/dev/full")):
        for _ in range(3):
            get_logger().info("a line")
    out, err = capsys.readouterr()
    assert out.count("a line") == 3
    assert err == "/dev/full ends here: No space left on device\n"


def draw():
    return (torch.randn(3).tolist(), torch.randint(1000, (2,)).tolist(), random.random(), np.random.rand())


def test_one_seed_seeds_all_as_programs_do():
    seed_all(7)
    drawn = draw()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert draw() == drawn


def test_each_step_and_coordinate_has_numbers_of_its_own():
    drawn = set()
    for seed, step, coordinate in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)):
        seed_step(seed, step, coordinate)
        drawn.add(str(draw()))
    assert len(drawn) == 4
    assert derived_seed(0, "start", 1) != derived_seed(0, 1, 1)


class Noisy(nn.Module):
    """What users write: dropout, noise, a time step for each sample."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x):
        x = self.fc(F.dropout(x + torch.randn_like(x), 0.5))
        self.seen.append((x.detach().sum().item(), torch.randint(1000, (len(x),)).tolist()))
        return x


def noise(rank, layout, outdir, before):
    """What this rank draws at the start, and in each of three steps; and the weights."""
    with program_on(rank), start_run("noise", groups.RunFlags(device="cpu", outdir=outdir), layout) as run:
        start = draw()
        model = build_model(run, Noisy, Plan({"fc": Replicated()}, fsdp_units=()))
        after = draw()
        weight = model.fc.weight.full_tensor().tolist()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batches = [torch.ones(4, 4)] * 3
        for _ in range(before):
            torch.rand(1)
        for step in run.steps(batches, 3, samples=4 * layout.dp):
            loss = model(step.batch).square().sum()
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"start": start, "after": after, "steps": model.seen, "weight": weight}


def test_ranks_that_share_samples_draw_the_same_and_others_do_not(run_on_ranks, tmp_path):
    ranks = run_on_ranks(noise, 4, Layout(dp_shard=2, tp=2), tmp_path / "a", 0)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0]["weight"] == ranks[2]["weight"]
    for name in ("start", "after"):
        for a, b in zip(ranks[0][name], ranks[2][name], strict=True):
            assert a != b
    drawn = [value for rank in (0, 2) for step in ranks[rank]["steps"] for value in map(str, step)]
    # Of two coordinates, in three steps: all differ.
    assert len(set(drawn)) == 12


@pytest.mark.long
def test_a_step_draws_the_same_whatever_was_drawn_before(run_on_ranks, tmp_path):
    runs = [run_on_ranks(noise, 2, Layout(dp_shard=2), tmp_path / str(before), before) for before in (0, 5)]
    assert [rank["steps"] for rank in runs[0]] == [rank["steps"] for rank in runs[1]]
