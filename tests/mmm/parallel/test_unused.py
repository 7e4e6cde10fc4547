"""Ranks whose samples use other parameters, without FSDP: gradients are those of plain PyTorch on the full batch. A
parameter that is not used has the gradient zero."""

import pytest
import torch
from torch import nn

from mmm.parallel import Layout, sync_gradients
from support.own_model import build, furthest, gradients, own, parameters, plain


class Net(nn.Module):
    """The widths of the branches differ, so that collectives which pair others' are no mere wrong numbers."""

    def __init__(self):
        super().__init__()
        self.common, self.never, self.head = nn.Linear(6, 8), nn.Linear(3, 3), nn.Linear(8, 2)
        self.left = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        h, first = self.common(x), x[:, 0] < 0
        out = h.clone()
        turns = [(self.left, first), (self.right, ~first)]
        for branch, pick in turns if x[0, 1] > 0 else turns[::-1]:
            if pick.any():
                out[pick] = out[pick] + branch(h[pick])
        return self.head(out)


def batches():
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        x[:4, 0] = -x[:4, 0].abs()
        x[4:, 0] = x[4:, 0].abs() * (-1) ** step  # in every other step the ranks use the same
        yield x


def trained(rank, technique, ranks, micro):
    """Steps of AdamW: how far each step's gradients are, and the weights in the end."""
    model = build(Net, Layout(dp_shard=ranks), data_parallel=technique)
    net, off = plain(model, Net), []
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, net)]
    for x in batches():
        x, part = x.requires_grad_(), own(x, rank.rank, ranks).requires_grad_()
        for n, some in enumerate(part.chunk(micro)):
            sync_gradients(model, n == micro - 1)
            model(some).square().sum().backward()
        net(x).square().sum().backward()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert all(parameter.grad is not None for parameter in model.parameters())
        off.append(furthest(gradients(model), gradients(net)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            off.append((model(part) - own(net(x), rank.rank, ranks)).abs().max().item())
    return [*off, furthest(parameters(model), parameters(net))]


@pytest.mark.parametrize(
    ("technique", "ranks", "micro"),
    [
        ("ddp", 2, 1),
        ("zero2", 2, 2),
        pytest.param("zero1", 4, 1, marks=pytest.mark.long),
        pytest.param("ddp", 4, 2, marks=pytest.mark.long),
    ],
)
def test_unused_parameters_count_as_zero(run_on_ranks, technique, ranks, micro):
    for off in run_on_ranks(trained, ranks, technique, ranks, micro):
        assert max(off) < 1e-12, off
