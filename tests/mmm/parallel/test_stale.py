"""A forward without backward between backward and the optimizer's step changes nothing."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from mmm.parallel import Layout, Plan
from mmm.parallel.dp.fsdp import reshard
from support.own_model import build, furthest, own, parameters, plain

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3).sin()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def trained(rank, technique, when, watch):
    model = build(net, Layout(dp_shard=2), Plan({}, fsdp_units=("0", "2")), data_parallel=technique, **when)
    other = plain(model, net)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    off = []
    for _ in range(3):
        outputs = []
        for each, x in ((model, own(X, rank.rank, 2)), (other, X)):
            output = each(x)
            output.square().sum().backward()
            with torch.no_grad() if watch else nullcontext():  # or with a graph that nobody goes back through
                each(x)
            outputs.append(output.detach())
        off.append((outputs[0] - own(outputs[1], rank.rank, 2)).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reshard(model)
    return [*off, furthest(parameters(model), parameters(other))]


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("when", [{}, {"reshard_after_forward": "never"}], ids=str)
def test_what_is_gathered_is_of_this_step(run_on_ranks, when, watch):
    for off in run_on_ranks(trained, 2, "fsdp", when, watch):
        assert max(off) < 1e-13, off
