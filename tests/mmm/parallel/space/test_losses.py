"""A loss that is weighted by latitude, over a sea that is not the same on each rank, beside plain PyTorch.

The fields are in a file, of which a rank reads its own rows.
"""

import h5py
import torch
import torch.distributed as dist
from torch import nn

from mmm.data.arrays import Arrays
from mmm.layout import PADDING, Layout
from mmm.parallel.cp.space.strips import own_slice
from mmm.parallel.plan import Field, Plan
from support.own_model import build, furthest, gradients, plain

RANKS = 2
# 7 on the first rank, and 8 on the second.
ROWS = 15
LATITUDES = torch.linspace(-1.5, 1.5, ROWS, dtype=torch.float64).cos()[:, None]
PLAN = Plan({}, (), space=Field((3, ROWS, 6)))


def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))


def weighted_error(output, targets, count):
    """What a rank has of the loss; the weights are behind the values, as further channels."""
    values, weights = targets.chunk(2, 1)
    return (weights * (output - values).square()).sum() / count


def write(path):
    generator = torch.Generator().manual_seed(0)
    fields = torch.randn(2, 3, ROWS, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 2, ROWS, 6, generator=generator, dtype=torch.float64)
    # Land is in the north.
    values[:, :, :4, :3] = PADDING
    weights = LATITUDES * (values != PADDING)
    with h5py.File(path, "w") as file:
        file["fields"] = fields.numpy()
        file["targets"] = torch.cat((values, weights), 1).numpy()


def errors(rank, path):
    """Of the loss, and of all gradients."""
    names = ["fields", "targets"]
    fields, targets = Arrays(path, names)[[0, 1]]
    # Of all rows, on every rank.
    count = targets[:, 2:].sum()
    model = build(make, Layout(dp_shard=1, cp=RANKS), PLAN, cp_style="space")
    net = plain(model, make)
    expected = weighted_error(net(fields), targets, count)
    expected.backward()
    # Of (channels, rows, columns).
    slices = (slice(None), own_slice(ROWS, RANKS, rank.rank))
    own_fields, own_targets = Arrays(path, names, parts=dict.fromkeys(names, slices))[[0, 1]]
    loss = weighted_error(model(own_fields), own_targets, count)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return abs(total - expected).item(), furthest(gradients(model), gradients(net))


def test_a_mean_of_each_ranks_own_latitudes(run_on_ranks, tmp_path):
    """Each rank divides by the sum of the weights of all: ranks have other latitudes, and other shares of land."""
    path = tmp_path / "fields.h5"
    write(path)
    for error in run_on_ranks(errors, RANKS, path):
        assert max(error) <= 1e-14
