"""Ranks whose samples go through other FSDP units, or leave parameters out: their run ends by name."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from mmm.errors import DivergedError
from mmm.parallel import Layout, Plan
from mmm.parallel.dp.forwards import FORWARDS, difference, forwards_differ
from mmm.trainer import BatchOptions, build_model, start_run, train_steps
from support.pool import program_on

PLAN = Plan({}, fsdp_units=("left", "right", "head"))


class Net(nn.Module):
    """Samples go left or right, or use a parameter of the root; all collectives have the same sizes."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.one, self.two = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x, kind, rank):
        other = kind == "units" and rank == 1
        x = self.right(x) if other else self.left(x)
        x = x * self.two if kind == "parameters" and rank == 1 else x * self.one
        return self.head(x)


def train(rank, kind, outdir):
    """Three steps, the second of which differs between ranks: how many are done when the run ends, and by what."""
    config = BatchOptions(device="cpu", dtype="fp32", outdir=outdir, batch_size=2)
    if rank.rank == 0:
        FORWARDS.note("a unit that an earlier run called after its last row")
    done = 0
    with ExitStack() as stack:
        stack.enter_context(program_on(rank))
        run = stack.enter_context(start_run("uneven", config, Layout().fit(2), []))
        model = build_model(run, Net, PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for step in train_steps(run, [torch.ones(2, 4)] * 3, optimizer, 3, samples=4):
                kind_now = kind if step.number == 1 else "alike"
                loss = model(step.batch, kind_now, rank.rank).square().sum()
                step.log(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
        except DivergedError as error:
            return done, str(error)
    return done, ""


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("alike", ()),
        ("units", ("left (not by rank 1)", "right (not by rank 0)")),
        ("parameters", ("no gradient of one (not by rank 0)", "no gradient of two (not by rank 1)")),
    ],
)
def test_ranks_that_differ_end_the_run_by_name(run_on_ranks, tmp_path, kind, names):
    for done, text in run_on_ranks(train, 2, kind, tmp_path):
        assert done == (2 if names else 3), text
        assert bool(text) == bool(names)
        for name in names:
            assert name in text


def test_stages_of_a_pipeline_have_other_units():
    layout = Layout(pp=2, dp_shard=2)
    hashes = torch.tensor([3.0, 3.0, 5.0, 5.0])
    assert forwards_differ(hashes, layout).item() == 0
    assert forwards_differ(hashes.flip(0).roll(1), layout).item() == 1


def test_order_alone():
    calls = [{"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert "another order" in difference(calls, Layout(dp_shard=2))
