"""Gradients with respect to a model's inputs, outputs of any structure, and averages of its weights: on each technique
as in plain PyTorch on the full batch."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.parallel import Layout, Plan, sync_gradients
from mmm.parallel.ema import EMA
from support import own_model
from support.own_model import build, furthest, gradients, own, parameters, plain

TECHNIQUES = ["ddp", "zero1", "zero2", "fsdp"]
RANKS = 2
# The whole batch, (8, 3).
X = torch.linspace(-2, 2, 24, dtype=torch.float64).view(8, 3).sin()


def critic():
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def generator():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def forces(model, x):
    """The loss of forces -dE/dx: differentiated twice. The last bias has no part in it."""
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (force - 1).square().sum() / X.numel(), force


def penalty(model, x):
    """WGAN's with a penalty on the gradient."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().sum()
    return (model(x).sum() + penalty) / len(X), gradient


def saliency(model, x):
    """The gradient of an input on the way to the parameters."""
    loss = model(x).square().sum() / len(X)
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss, gradient


def twice(rank, technique, kind):
    """Two steps, whose gradients add up: how far they, and the inputs', are from plain PyTorch's."""
    model = build(critic, Layout(dp_shard=RANKS), data_parallel=technique)
    full = X.clone().requires_grad_()
    shard = own(X, rank.rank, RANKS).requires_grad_()
    net = plain(model, critic)
    off = []
    for _ in range(2):
        loss, inner = kind(model, shard)
        loss.backward()
        expected_loss, expected = kind(net, full)
        expected_loss.backward()
        off.append(furthest(gradients(model), gradients(net)))
        off.append((inner - own(expected, rank.rank, RANKS)).abs().max().item())
        off.append((shard.grad - own(full.grad, rank.rank, RANKS)).abs().max().item())
    return off


@pytest.mark.parametrize(
    ("kind", "techniques"), [(saliency, TECHNIQUES), (forces, TECHNIQUES[:3]), (penalty, TECHNIQUES[:3])]
)
def test_gradients_of_inputs(run_on_ranks, kind, techniques):
    for technique in techniques:
        for off in run_on_ranks(twice, RANKS, technique, kind):
            assert max(off) < 1e-14, (technique, off)


def refused(rank):
    with pytest.raises(ConfigError, match=r"create_graph=True"):
        twice(rank, "fsdp", forces)
    return True


def test_fsdp_refuses_a_second_backward(run_on_ranks):
    assert run_on_ranks(refused, RANKS) == [True] * RANKS


def gan(rank, technique, freeze):
    """Three steps of a generator and its critic, both parallel: how far the weights are from plain PyTorch's."""
    layout = Layout(dp_shard=RANKS)
    models = [build(make, layout, seed=n, data_parallel=technique) for n, make in enumerate((generator, critic))]
    plains = [plain(model, make) for model, make in zip(models, (generator, critic), strict=True)]
    for (g, d), z in ((models, own(X, rank.rank, RANKS)), (plains, X)):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (g, d)]
        for _ in range(3):
            for parameter in d.parameters():
                parameter.requires_grad_(not freeze)
            (-d(g(z)).sum() / len(X)).backward()
            optimizers[0].step()
            for parameter in d.parameters():
                parameter.requires_grad_()
                assert not freeze or parameter.grad is None
            for optimizer in optimizers:
                optimizer.zero_grad()
            ((d(g(z).detach()) - d(z * 2)).sum() / len(X)).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    return [furthest(parameters(one), parameters(other)) for one, other in zip(models, plains, strict=True)]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_generator_learns_through_its_critic(run_on_ranks, technique):
    for freeze in (False, True):
        for off in run_on_ranks(gan, RANKS, technique, freeze):
            assert max(off) < 1e-14, (freeze, off)


@dataclass
class Output:
    loss: Tensor | None
    hidden: tuple


class Structured(nn.Module):
    """Its output in one of many structures, with what is no tensor in it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.one = nn.Linear(3, 2)
        self.two = nn.Linear(3, 2)
        self.inner = None
        if kind == "unit":
            self.inner = Structured("object")

    def forward(self, x):
        a = self.one(x)
        b = self.two(x)
        return {
            "tuple": lambda: (a, None, b),
            "dict": lambda: {"a": a, "rest": [b, "text"]},
            "dataclass": lambda: Output(None, (a, b)),
            "object": lambda: SimpleNamespace(a=a, b=b),
            "unit": lambda: (a * self.inner(x).a, None, b),
        }[self.kind]()


def sum_of(output):
    match output:
        case (a, None, b) | {"a": a, "rest": [b, "text"]} | Output(None, (a, b)) | SimpleNamespace(a=a, b=b):
            return a.square().sum() + b.sum()


def structured(rank, technique):
    off = []
    for kind in ("tuple", "dict", "dataclass", "object", "unit"):
        plan = Plan({}, fsdp_units=("inner",), optional=("inner",))
        model = build(lambda kind=kind: Structured(kind), Layout(dp_shard=RANKS), plan, data_parallel=technique)
        net = plain(model, lambda kind=kind: Structured(kind))
        sum_of(model(own(X, rank.rank, RANKS))).backward()
        sum_of(net(X)).backward()
        off.append(furthest(gradients(model), gradients(net)))
    return off


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_outputs_of_any_structure(run_on_ranks, technique):
    for off in run_on_ranks(structured, RANKS, technique):
        assert max(off) < 1e-13, off


def summed_again(rank, technique):
    """Backwards that sum over the ranks, and some that do not, onto gradients that are there, changed in between."""
    model = build(critic, Layout(dp_shard=3), data_parallel=technique)
    net = plain(model, critic)
    off = []
    shard = own(X, rank.rank, 3)
    for now in (True, True, False, True, False, False, True):
        sync_gradients(model, now)
        model(shard).square().sum().backward()
        net(X).square().sum().backward()
        if now:
            off.append(furthest(gradients(model), gradients(net)))
            for tensor in (*model.parameters(), *net.parameters()):
                tensor.grad *= 0.5
    return off


@pytest.mark.parametrize("technique", ["ddp", "zero2"])
def test_gradients_that_are_there_count_once(run_on_ranks, technique):
    for off in run_on_ranks(summed_again, 3, technique):
        assert max(off) < 1e-12, off


def unfrozen(rank):
    def frozen():
        net = critic()
        net[0].requires_grad_(False)
        return net

    model = build(frozen, Layout(dp_shard=RANKS), data_parallel="ddp")
    model.module[0].requires_grad_()
    with pytest.raises(ConfigError, match=r"0\.weight"):
        model(X)
    return True


def test_a_parameter_that_is_unfrozen_too_late_is_refused(run_on_ranks):
    assert run_on_ranks(unfrozen, RANKS) == [True] * RANKS


def averages(rank, technique):
    """An EMA over four steps, against PyTorch's own on the full batch: averages, and what the model computes."""
    make = critic
    decay = 0.7
    x = own(X, rank.rank, RANKS)
    model = build(make, Layout(dp_shard=RANKS), Plan({}, fsdp_units=("0", "2")), data_parallel=technique)
    net = plain(model, make)
    ema = EMA(model, decay)
    expected = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    # The first takes the parameters.
    expected.update_parameters(net)
    for module, samples, update in (
        (model, x, ema.update),
        (net, X, lambda: expected.update_parameters(net)),
    ):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(4):
            (module(samples).square().sum() / len(X)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                # FSDP leaves its root gathered.
                module(samples)
            update()
    off = [furthest({n: own_model.full(t) for n, t in ema.state_dict().items()}, parameters(expected.module))]
    before = model(x).detach()
    with ema.averaged(), torch.no_grad():
        off.append((model(x) - own(expected(X), rank.rank, RANKS)).abs().max().item())
    off.append((model(x) - before).abs().max().item())
    off.append(furthest(parameters(model), parameters(net)))
    other = EMA(model, decay)
    other.load_state_dict(ema.state_dict())
    assert all(torch.equal(a.to_local() if technique != "ddp" else a, b.to_local() if technique != "ddp" else b)
               for a, b in zip(other.state_dict().values(), ema.state_dict().values(), strict=True))  # fmt: skip
    with pytest.raises(ConfigError, match="the averages do not have the parameters of the model: x"):
        other.load_state_dict({**ema.state_dict(), "x": X})
    return off


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_averaged_weights(run_on_ranks, technique):
    for off in run_on_ranks(averages, RANKS, technique):
        assert max(off) < 1e-12, off
    with pytest.raises(ConfigError, match=r"1\.5"):
        EMA(nn.Linear(1, 1), 1.5)
