"""What the ranks show as the loss: it, parts of it, or something else with right gradients. A model that does not
learn, on one device: that other programs agree with it says nothing."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mmm_verify import verify
from support.by_hand import add_up, averaged, nothing


def fields():
    """Eight samples of four positions."""
    return torch.randn(8, 4, 3), torch.randn(8, 4, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Lossy(Net):
    """Returns its own loss, as many a model of a library."""

    def forward(self, batch):
        return F.mse_loss(super().forward(batch[0]), batch[1])


def add_up_over_cp(model, mesh):
    group = mesh["cp"].get_group()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))


def own_channels(model, mesh):
    """The head's rows: what comes before has its gradient added up."""
    rank = mesh.get_rank()
    model.head.weight = nn.Parameter(model.head.weight.detach().chunk(2)[rank].clone())
    model.head.bias = nn.Parameter(model.head.bias.detach().chunk(2)[rank].clone())
    # Each rank's rows give a part of its gradient.
    add_up(model.body, mesh)


def dtensor_channels(model, mesh):
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})


def squares(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def showing(change):
    """A step with right gradients, that shows something of its loss."""

    def step(model, batch, mesh):
        loss = squares(model, batch)
        if mesh is None:
            return loss
        loss.backward()
        return change(loss.detach(), mesh)

    return step


def all_reduced(factor):
    def change(loss, mesh):
        dist.all_reduce(loss)
        return loss * factor

    return showing(change)


def positions(batch, mesh):
    return [tensor.chunk(mesh["cp"].size(), 1)[mesh["cp"].get_local_rank()] for tensor in batch]


def mean_of_positions(model, batch, mesh):
    return squares(model, batch if mesh is None else positions(batch, mesh))


def part_of_positions(model, batch, mesh):
    return mean_of_positions(model, batch, mesh) / (mesh["cp"].size() if mesh is not None else 1)


def renamed(step):
    def with_other_name(model, batch, mesh):
        return step(model, batch, None if mesh is None else {"cp": mesh})

    return with_other_name


def part_of_samples(model, batch, mesh):
    return squares(model, batch) / (mesh.size() if mesh is not None else 1)


def halved_once_more(model, batch, mesh):
    """Right parts over cp, and the number that is shown divided by the size of tp as well."""
    loss = part_of_positions(model, batch, mesh)
    if mesh is None:
        return loss
    loss.backward()
    # Gradients are right, and only this number is not.
    return loss.detach() / mesh["tp"].size()


def part_of_channels(model, batch, mesh, mean=False):
    if mesh is None:
        return squares(model, batch)
    # (batch, positions, 1): the channel that this rank computes
    target = batch[1].chunk(2, -1)[mesh.get_rank()]
    loss = (model(batch[0]) - target).square().sum() / batch[1].numel()
    loss.backward()
    return loss.detach() * (2 if mean else 1)


mean_of_channels = partial(part_of_channels, mean=True)


def of_dtensors(model, batch, mesh):
    target = batch[1] if mesh is None else distribute_tensor(batch[1], mesh, [Shard(-1)])
    return (model(batch[0]) - target).square().mean()


def of_itself(model, batch):
    return model(batch)


def on_the_last(loss, mesh):
    # As a pipeline: the other stages show 0.
    return loss * (mesh.get_rank() == mesh.size() - 1)


def of_one_sample_more(loss, mesh):
    # The mean over two ranks is right.
    return loss + 0.1 * (-1) ** mesh.get_rank()


@pytest.mark.parametrize(
    ("mesh", "parallelize", "step", "reading"),
    [
        ("dp2", averaged, squares, "the mean over dp"),
        ("dp2", add_up, part_of_samples, "the sum over dp"),
        ("dp2", averaged, all_reduced(0.5), None),
        ("tp2", nothing, squares, None),
        ("cp2", averaged, mean_of_positions, "the mean over cp"),
        ("cp2", add_up, part_of_positions, "the sum over cp"),
        # No name that says so.
        ("ways2", add_up, renamed(part_of_positions), "the sum over ways"),
        ("tp2,cp2", add_up_over_cp, part_of_positions, "the sum over cp"),
        ("tp2", own_channels, part_of_channels, "the sum over tp"),
        ("tp2", dtensor_channels, of_dtensors, None),
        ("pp2", nothing, showing(on_the_last), None),
    ],
)
def test_right(mesh, parallelize, step, reading):
    verdict = verify(Net, parallelize, fields, step, mesh)
    assert verdict.same, f"{verdict}\n{verdict.details}"
    # None: every rank has the whole loss.
    assert re.search(r"(the (mean|sum) over \w+)?, within", verdict.compared["loss"])[1] == reading, verdict


@pytest.mark.parametrize(
    ("mesh", "parallelize", "step", "says"),
    [
        ("tp2", nothing, showing(lambda loss, mesh: loss / 2), r"on every rank: 1/2 times \(one over the size of tp\)"),
        ("dp2", averaged, all_reduced(1.0), r"on every rank: 2 times \(the size of dp\)"),
        (
            "tp2,cp2",
            add_up_over_cp,
            halved_once_more,
            r"in the sum over cp: 1/2 times \(one over the size of tp or cp\)",
        ),
        ("tp2", nothing, showing(of_one_sample_more), "the ranks of tp have different losses.*the mean of them is"),
        ("tp2", own_channels, mean_of_channels, "the ranks of tp have different losses.*the mean of them is"),
        ("dp2", averaged, showing(lambda loss, mesh: loss * 1.5), "in the mean over dp, .* in the sum, but"),
    ],
)
def test_wrong(mesh, parallelize, step, says):
    verdict = verify(Net, parallelize, fields, step, mesh)
    assert verdict.exit_code == 1, str(verdict)
    (finding,) = verdict.findings
    assert finding.stage == "loss"
    assert re.search(says, str(finding)), finding
    # A distance relative to the largest loss of a part of the batch would contradict the factor.
    assert "off by" not in str(finding)


def nearly_alike():
    """Eight samples, whose second two positions are nearly the first two."""
    inputs = torch.randn(8, 2, 3, dtype=torch.float64)
    targets = torch.randn(8, 2, 2, dtype=torch.float64)
    # (8, 4, 3), (8, 4, 2)
    return torch.cat([inputs, inputs], 1), torch.cat([targets, targets * (1 + 1e-10)], 1)


def test_parts_whose_losses_are_near_each_other_by_chance():
    verdict = verify(Net, add_up, nearly_alike, part_of_positions, "cp2")
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert "the sum over cp" in verdict.compared["loss"]


def test_a_model_that_returns_its_loss():
    assert verify(Lossy, averaged, fields, of_itself, "dp2").same
    unsynchronized = verify(Lossy, nothing, fields, of_itself, "dp2")
    assert unsynchronized.exit_code == 1
    assert unsynchronized.first == "every gradient"


def advantages():
    """Rewards around their mean."""
    rewards = torch.randn(8, dtype=torch.float64)
    return torch.randn(8, 4, 3), (rewards - rewards.mean()) / rewards.std()


def of_a_policy(model, batch):
    """Its first loss is 0 but for rounding, and its gradients are not."""
    # (batch,)
    scores = model(batch[0]).mean((1, 2))
    return -((scores - scores.detach()).exp() * batch[1]).mean()


def with_other_rounding(model, batch, mesh):
    loss = of_a_policy(model, batch)
    if mesh is None:
        return loss
    loss.backward()
    # Less than the rounding of any loss that is not 0.
    return loss.detach() + 1e-17


@pytest.mark.parametrize(("mesh", "parallelize"), [("dp2", averaged), ("tp2", nothing)])
def test_a_loss_of_0(mesh, parallelize):
    verdict = verify(Net, parallelize, advantages, with_other_rounding, mesh)
    assert verdict.same, str(verdict)
    assert not verdict.notes, verdict


def plain_fields():
    return torch.randn(8, 3), torch.randn(8, 2)


def classes():
    return torch.randn(8, 3), torch.randint(2, (8,))


def ignored():
    return torch.randn(8, 3), torch.full((8,), -100)


def alike():
    return torch.ones(8, 3), torch.ones(8, 2)


def twice_the_same():
    return torch.randn(4, 3).repeat(2, 1), torch.ones(8, 2)


class Gated(nn.Module):
    """A residual branch behind a gate that nothing opens."""

    def __init__(self, opening=0.0):
        super().__init__()
        self.inlet = nn.Linear(3, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("gate", torch.tensor(opening))

    def forward(self, x):
        h = self.inlet(x)
        return self.head(h + self.gate * self.body(h))


class Shut(Gated):
    def forward(self, x):
        return super().forward(x) * self.gate


class Certain(nn.Linear):
    """Probabilities that add up to 1, whatever the weights are, but for rounding."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        # Always 1.
        return super().forward(x).softmax(-1).sum(-1, keepdim=True)


def mean_of_labelled(model, batch):
    inputs, labels = batch
    losses = F.cross_entropy(model(inputs), labels, reduction="sum")
    return losses / (labels != -100).sum().clamp(min=1)


def times_nothing(model, batch):
    return F.mse_loss(0 * model(batch[0]), batch[1])


def of_its_output(model, batch):
    return model(batch[0]).mean()


def decay_alone(model, batch):
    shown = F.mse_loss(model(batch[0]), batch[1]).detach()
    # Only the decay has gradients.
    return shown + sum(parameter.square().sum() for parameter in model.parameters())


def without_mean(model, batch):
    """A loss of 0, as a policy's with advantages around their mean: its gradients are not 0."""
    scores = model(batch[0]).mean(-1)
    return (scores - scores.detach()).mul(batch[1].mean(-1)).mean()


@pytest.mark.parametrize(
    ("mesh", "model", "batch", "step", "says"),
    [
        ("dp2", Shut, plain_fields, None, "every gradient on one device is 0"),
        ("tp2", Shut, plain_fields, None, "every gradient on one device is 0"),
        ("dp2", Gated, ignored, mean_of_labelled, "every gradient on one device is 0, and the loss is 0 "),
        ("tp2", Gated, plain_fields, times_nothing, "every gradient on one device is 0"),
        ("dp2", Certain, plain_fields, of_its_output, "every gradient on one device is 0, and the loss is 1 "),
        ("dp2", Gated, plain_fields, decay_alone, "they do not change with the input"),
    ],
)
def test_dead(mesh, model, batch, step, says):
    verdict = verify(model, nothing, batch, step, mesh)
    assert verdict.exit_code == 2, str(verdict)
    assert says in verdict.reason


@pytest.mark.parametrize("batch", [alike, twice_the_same])
def test_a_batch_that_repeats_itself(batch):
    verdict = verify(Gated, nothing, batch, mesh="dp2")
    assert verdict.exit_code == 2, str(verdict)
    assert "2 parts are alike" in verdict.reason
    # Ranks of tp see the whole batch: nothing is cut.
    assert verify(Gated, nothing, batch, mesh="tp2").same


@pytest.mark.parametrize(
    ("model", "batch", "step"),
    [
        (lambda: Gated(1.0), plain_fields, None),
        (lambda: Gated(1e-6), plain_fields, None),
        (lambda: Gated(1.0), classes, mean_of_labelled),
        (lambda: Gated(1.0), plain_fields, without_mean),
    ],
)
def test_alive(model, batch, step):
    verdict = verify(model, averaged, batch, step, "dp2")
    assert verdict.same, str(verdict)
    assert not verdict.notes


def test_a_dead_part_is_said():
    verdict = verify(Gated, averaged, plain_fields, mesh="dp2")
    assert verdict.same, str(verdict)
    assert "the gradient of body.weight and of 1 more is exactly 0 on one device" in str(verdict)
