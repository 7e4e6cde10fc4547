"""BatchNorm over the global batch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mmm.errors import ConfigError
from mmm.layout import Techniques
from mmm.parallel import Layout, Plan, sync_gradients
from mmm.parallel.checks import check_techniques
from mmm.parallel.dp.batch_norm import check_batch_norm, global_statistics
from mmm.parallel.dp.wrapped import Wrapper
from support.own_model import build, furthest, gradients, own, parameters, plain

# Over 2 ranks 5 and 4 samples.
SIZE = 9


class Net(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=momentum)
        self.mix = nn.Linear(12, 6)
        self.plain = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        # (batch, channels · height · width)
        x = self.mix(x.flatten(1))
        return self.out(self.plain(x))


def batches():
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        shift = torch.linspace(-2, 4, SIZE, dtype=torch.float64).view(-1, 1, 1, 1)
        yield torch.randn(SIZE, 1, 4, 4, generator=generator, dtype=torch.float64) * (1 + step) + shift


def trained(rank, layout, technique, momentum, checkpointing):
    """Gradients, weights, statistics, and outputs in evaluation: how far they are from plain PyTorch's."""

    def make():
        return Net(momentum)

    ranks = layout.dp
    plan = Plan({}, fsdp_units=("conv", "mix"), checkpointed=("norm",))
    model = build(make, layout, plan, data_parallel=technique, checkpointing=checkpointing)
    net = plain(model, make)
    off = []
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.1, momentum=0.9) for either in (model, net)]
    for x in batches():
        for either, some in ((model, own(x, rank.rank, ranks)), (net, x)):
            # Each sample's output counts by the sum of its pixels.
            loss = either(some)[:, 0] * some.sum((1, 2, 3))
            loss.sum().div(SIZE).backward()
        off.append(furthest(gradients(model), gradients(net)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    inner = model.module if isinstance(model, Wrapper) else model
    buffers = {name.replace("_checkpoint_wrapped_module.", ""): b.double() for name, b in inner.named_buffers()}
    off += [
        furthest(parameters(model), parameters(net)),
        furthest(buffers, {n: b.double() for n, b in net.named_buffers()}),
    ]
    for either in (model, net):
        either.eval()
        (either.module if isinstance(either, Wrapper) else either).plain.train()
    x = next(batches())
    ours = model(own(x, rank.rank, ranks))
    expected = own(net(x), rank.rank, ranks)
    return [*off, (ours - expected).abs().max().item()]


@pytest.mark.parametrize(
    ("layout", "technique", "momentum", "checkpointing"),
    [
        (Layout(dp_shard=2), "fsdp", 0.1, "none"),
        (Layout(dp_shard=2), "ddp", None, "none"),
        (Layout(dp_shard=2), "zero2", 0.1, "full"),
        pytest.param(Layout(dp_shard=1), "fsdp", 0.1, "full", marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=3), "zero1", 0.1, "none", marks=pytest.mark.long),
        pytest.param(Layout(dp_replicate=2, dp_shard=2), "hsdp", 0.1, "full", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_statistics_of_the_global_batch(run_on_ranks, layout, technique, momentum, checkpointing):
    for off in run_on_ranks(trained, layout.ranks, layout, technique, momentum, checkpointing):
        assert max(off) < 1e-11, off


def of_rank_0(rank):
    """Statistics, and gradients of their sums, where rank 1 has no samples; and what they should be."""
    full = torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own_samples = (full if rank.is_main else full[:0]).clone().requires_grad_()
    mean, variance, count = global_statistics(own_samples, [0, 2], [dist.group.WORLD])
    # The loss is the sum of both ranks'.
    ((mean.sum() + variance.sum()) / rank.world_size).backward()
    full.requires_grad_()
    expected = [full.mean([0, 2], keepdim=True), full.var([0, 2], correction=0, keepdim=True)]
    sum(value.sum() for value in expected).backward()
    return [mean, variance, count, own_samples.grad], [*expected, torch.tensor([10.0]), full.grad]


def test_a_rank_without_samples_adds_nothing(run_on_ranks):
    """The mean of nothing is NaN, and was that of all ranks."""
    first, second = run_on_ranks(of_rank_0, 2)
    for own_value, expected in zip(*first, strict=True):
        torch.testing.assert_close(own_value.detach(), expected.detach(), rtol=1e-12, atol=1e-12, check_dtype=False)
    assert all(value.isfinite().all() for value in second[0])


@pytest.mark.parametrize(
    ("layout", "techniques", "message"),
    [
        (Layout(dp_shard=1), {"microbatches": 2}, "BatchNorm2d: .*GroupNorm"),
        (Layout(dp_shard=2, pp=2), {}, "BatchNorm2d"),
    ],
)
def test_micro_batches_are_refused(layout, techniques, message):
    net = Net()
    with pytest.raises(ConfigError, match=message):
        check_techniques(net, Plan({}, fsdp_units=()), layout, Techniques(**techniques))
    net.eval()
    net.plain = nn.Identity()
    check_techniques(net, Plan({}, fsdp_units=()), layout, Techniques(**techniques))


def test_a_forward_of_its_own_is_refused():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(ConfigError, match="0 is a Own, whose forward is its own"):
        check_batch_norm(nn.Sequential(Own(2)), Layout(dp_shard=2), Techniques())
    check_batch_norm(nn.Sequential(Own(2)), Layout(dp_shard=1), Techniques())


def by_hand(rank):
    model = build(Net, Layout(dp_shard=2), data_parallel="ddp")
    with pytest.raises(ConfigError, match=r"BatchNorm2d"):
        sync_gradients(model, False)
    return True


def test_a_loops_own_micro_batches_are_refused(run_on_ranks):
    assert run_on_ranks(by_hand, 2) == [True, True]
