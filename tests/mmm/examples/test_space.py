"""The example as a user runs it, and its halo by itself."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mmm.history
from mmm.errors import UserError
from mmm.examples.space import Config, Halo, UNet, shard_rows, train
from mmm.nn import weights
from mmm.run.command_line import configure
from support.programs import run_program

ROWS, F64 = 12, torch.float64


@pytest.mark.long
def test_same_losses_as_on_one_device(run_on_ranks, tmp_path):
    flags = [
        "--dtype",
        "fp64",
        "--max_iters",
        "3",
        "--global_batch_size",
        "2",
        "--no-plots",
        "--outdir",
        tmp_path / "four",
    ]
    done = run_program(run_on_ranks, 4, "mmm.examples.space", *flags)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    train(configure(Config, global_batch_size=2, max_iters=3, dtype="fp64", plots=False, outdir=tmp_path / "one"))
    one, four = (mmm.history.load(tmp_path / name) for name in ("one", "four"))
    np.testing.assert_allclose(one.loss, four.loss, rtol=1e-9)


def gradients(model, x, dy):
    """Of the input, and of each parameter."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return y.detach(), x.grad, [p.grad for p in model.parameters()]


def compared(rank):
    """How far this rank's strip of a U-Net's output and gradients is from one device's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, ROWS, 6, generator=generator, dtype=F64)
    dy = torch.randn(2, ROWS, 6, 3, generator=generator, dtype=F64)
    model = UNet().to(F64)
    weights.initialize(model, 0)
    y, dx, full = gradients(model, x, dy)
    own = torch.arange(ROWS).chunk(rank.world_size)[rank.rank]
    shard_rows(model, dist.group.WORLD)
    own_y, own_dx, parts = gradients(model, x[:, :, own], dy[:, own])
    for tensor in parts:
        dist.all_reduce(tensor)
    pairs = [(own_y, y[:, own]), (own_dx, dx[:, :, own]), *zip(parts, full, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_computes_what_one_device_does_of_its_rows(run_on_ranks, ranks):
    """A halo that comes from the wrong side, or whose gradient stays away, would be off by a part of 1."""
    assert max(run_on_ranks(compared, ranks)) < 1e-12


def alone(rank):
    """A convolution with a halo on one rank, whose two neighbours are the field's ends."""
    conv = nn.Conv2d(2, 3, 3, padding=1, dtype=F64)
    x = torch.randn(1, 2, 4, 5, dtype=F64)
    y = F.conv2d(Halo.apply(x, dist.group.WORLD), conv.weight, conv.bias, padding=(0, 1))
    return float((y - conv(x)).abs().max())


def test_the_ends_of_the_field_are_padding(run_on_ranks):
    assert run_on_ranks(alone, 1)[0] < 1e-14


def test_rows_that_ranks_cannot_share_are_refused(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="64 rows over 3 ranks"):
        train(configure(Config, device="cpu"))
