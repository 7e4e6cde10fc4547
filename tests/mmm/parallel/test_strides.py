"""What passes between pipeline stages lies in memory in the order of its dims, whatever data and models make."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmm.data import Batch
from mmm.data.images.batches import BatchOrder
from mmm.data.images.datasets import load_images
from mmm.layout import Techniques
from mmm.models.cnn.model import CNN, CNNConfig
from mmm.models.cnn.plan import cnn_plan
from mmm.nn import weights
from mmm.parallel import Layout, build_mesh, cross_entropy
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.parallel.plan import Plan
from mmm.parallel.pp.p2p import to_contiguous
from support.own_model import FP64

CPU = torch.device("cpu")
BATCH = 8


class ChannelsLast(nn.Module):
    """A net as a user writes it: its convolutions work channels-last, its second part on a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module | None = nn.Conv2d(1, 4, 3)
        self.second: nn.Module | None = nn.Conv2d(4, 3, 3)
        self.third: nn.Module | None = nn.Linear(24, 6)
        self.last: nn.Module | None = nn.Linear(6 * 24 * 3, 10)

    def forward(self, x):
        if self.first is not None:
            # (batch, 4, 26, 26)
            x = F.relu(self.first(x.to(memory_format=torch.channels_last)))
        if self.second is not None:
            # (batch, 24, 3, 24)
            x = F.relu(self.second(x.to(memory_format=torch.channels_last))).transpose(1, 2)
        if self.third is not None:
            # (batch, 6, 3, 24)
            x = self.third(x).transpose(1, 3)
        if self.last is None:
            return x
        return self.last(x.flatten(1))

    def init_rule(self, name):
        return weights.Init("normal", 0.2)


# How each model is sharded.
PLANS = {
    "cnn": cnn_plan(),
    "channels last": Plan(tensor={}, fsdp_units=("first", "second"), stages=("first", "second", "third", "last")),
}


def build(model):
    if model == "cnn":
        return CNN(CNNConfig(image_size=28, width1=4, width2=4, hidden=8).without_dropout())
    return ChannelsLast()


def images(step):
    """Real ones, enlarged from 8 × 8: all of a global batch."""
    return BatchOrder(load_images("digits", image_size=28).train, BATCH, 0).batch(step)


def expected(model):
    net = build(model).double()
    losses = []
    weights.initialize(net, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        loss = F.cross_entropy(net(images(step).inputs.double()), images(step).targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(rank, model, layout, schedules):
    """Losses by each schedule, an evaluation in between."""
    everything = []
    mesh = build_mesh(layout, "cpu")
    plan = PLANS[model]
    for schedule in schedules:
        with torch.device("meta"):
            full = build(model)
            sample = torch.zeros(BATCH, 1, 28, 28)
        techniques = Techniques(schedule=schedule, microbatches=8 if layout.pp == 4 else 4)
        made = ParallelModel(
            full,
            plan,
            mesh,
            FP64,
            techniques,
            partition_model(full, plan, layout, techniques, sample),
            device=CPU,
            seed=0,
            loss=cross_entropy,
        )
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, foreach=False)
        losses = []
        for step in range(3):
            batch = images(step)
            pixels = batch.inputs.double()
            if step == 1:
                seen = made.evaluate(Batch(pixels, batch.targets, batch.count)).item()
            losses.append(made.forward_backward(Batch(pixels, batch.targets, batch.count)).item())
            optimizer.step()
            optimizer.zero_grad()
        assert seen == pytest.approx(losses[1], rel=1e-12)
        everything.append(losses)
    return everything


@pytest.mark.parametrize("model", PLANS)
@pytest.mark.parametrize(
    ("pp", "schedules"),
    [
        (4, ("1F1B",)),
        pytest.param(2, ("GPipe", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"), marks=pytest.mark.long),
    ],
)
def test_pipelines_of_images(run_on_ranks, model, pp, schedules):
    wanted = expected(model)
    for losses in run_on_ranks(train, pp, model, Layout(pp=pp, dp_shard=1), schedules):
        for of_one in losses:
            assert of_one == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 1, 4, 4), (16, 1, 4, 1)), ((2, 3, 4), (12, 1, 3)), ((1, 3), (1, 1)), ((0, 2), (7, 3))]
)
def test_in_order(shape, strides):
    odd = torch.empty_strided(shape, strides).fill_(1.5)
    assert to_contiguous(odd).stride() == torch.empty(shape).stride()
    assert torch.equal(to_contiguous(odd), odd)
    usual = torch.ones(shape)
    assert to_contiguous(usual) is usual
