"""Models of a user's own start, on every mesh, with what their constructors made, or with a state dict."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import mmm.run.standard  # noqa: F401  # before `program_on` looks for it
from mmm.errors import ConfigError
from mmm.nn.init import Init
from mmm.parallel import (
    Layout,
    Plan,
    Replicated,
    loaded_values,
    materialize,
    meta_parameters,
    sync_gradients,
    to_local,
)
from mmm.run import options as groups
from mmm.run.save_model import full_tensors
from mmm.trainer import build_model, start_run
from support.pool import program_on

CPU = torch.device("cpu")
SEED = 3


class Scale(nn.Module):
    """Parameters of its own, some of them frozen."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.waves = nn.Parameter(torch.arange(width).sin(), requires_grad=False)
        self.shift = nn.Parameter(torch.tensor(np.random.rand(width)).float())
        self.register_buffer("features", torch.randn(width))

    def forward(self, x):
        return x * self.scale + self.waves * self.features + self.shift * self.factor

    factor = 1.0


class Net(nn.Module):
    """Weights that start in every way that people write."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.first = nn.Linear(6, 8)
        self.own = Scale(8)
        self.last = nn.Linear(8, 6, bias=False)
        self.apply(self._init)
        nn.init.orthogonal_(self.first.weight)
        self.first.bias.data[2:4] = 0.5
        with torch.no_grad():
            self.up.weight.mul_(1 + random.random())
        weight = torch.eye(8, 16) + 0.1 * torch.randn(8, 16)
        self.down.load_state_dict({"weight": weight, "bias": torch.ones(8)})
        self.down.weight.requires_grad_(False)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.clone())
        # No tensor, and random.
        self.own.factor = torch.rand(()).item()

    @staticmethod
    def _init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        x = self.own(self.first(x))
        return self.last(x + self.down(self.up(x).tanh()))


# How the model of this file is sharded.
PLAN = Plan(
    {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        **dict.fromkeys(("first", "own", "last"), Replicated()),
    },
    fsdp_units=("up", "own"),
)


def plain(seed=SEED):
    """What a program without a mesh makes."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return [Net().double() for _ in range(2)]


def options(outdir):
    return groups.RunFlags(device="cpu", dtype="fp64", seed=SEED, outdir=outdir)


def inputs():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(model, x):
    return model(x).square().sum() / 48


def state_of(model):
    return {name: to_local(tensor).clone() for name, tensor in full_tensors([model])}


def trained(rank, layout, outdir, data_parallel, microbatches):
    """The weights that two models start with, and of the second those after a step, and its loss."""
    with program_on(rank), start_run("build", options(outdir), layout) as run:
        # Ranks may have drawn other numbers before.
        torch.rand(rank.rank + 1)
        first, model = (build_model(run, Net, PLAN, data_parallel=data_parallel) for _ in range(2))
        starts = [state_of(first), state_of(model)]
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        samples = 8 // layout.dp
        own = inputs()[layout.dp_coordinate(rank.rank) * samples :][:samples].chunk(microbatches)
        losses = []
        for index, x in enumerate(own, start=1):
            sync_gradients(model, index == microbatches)
            losses.append(loss_of(model, x))
            losses[-1].backward()
        optimizer.step()
        return starts, state_of(model), run.global_sum(sum(losses))


@pytest.mark.parametrize(
    ("layout", "data_parallel", "microbatches"),
    [
        pytest.param(Layout(dp_shard=2), "ddp", 1, marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2), "zero2", 2, marks=pytest.mark.long),
        (Layout(dp_shard=2, tp=2), "fsdp", 2),
    ],
    ids=str,
)
def test_what_the_constructor_made_stays(run_on_ranks, tmp_path, layout, data_parallel, microbatches):
    nets = plain()
    starts = [net.state_dict() for net in nets]
    starts = [{name: tensor.clone() for name, tensor in state.items()} for state in starts]
    optimizer = torch.optim.SGD((p for p in nets[1].parameters() if p.requires_grad), lr=0.1)
    loss = loss_of(nets[1], inputs())
    loss.backward()
    optimizer.step()
    for got, after, total in run_on_ranks(trained, layout.ranks, layout, tmp_path, data_parallel, microbatches):
        for state, expected in zip(got, starts, strict=True):
            assert state.keys() == expected.keys()
            for name, tensor in state.items():
                assert torch.equal(tensor, expected[name]), name
        assert total == pytest.approx(loss.item(), rel=1e-13)
        for name, tensor in after.items():
            torch.testing.assert_close(tensor, nets[1].state_dict()[name], rtol=1e-13, atol=1e-15)


def alone(tmp_path, *made):
    """One rank: the states of models that `build_model` makes of each of `made`."""
    with start_run("build", options(tmp_path), Layout().fit(1)) as run:
        return [state_of(build_model(run, Net, PLAN, **fields)) for fields in made]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def test_models_differ_unless_they_have_one_name(tmp_path):
    made = ({}, {}, {"name": "critic"}, {"name": "critic"}, {"name": "other"})
    a, b, critic, again, other = alone(tmp_path, *made)
    assert same(critic, again)
    for one, two in ((a, b), (a, critic), (b, critic), (critic, other)):
        for name in ("up.weight", "first.weight", "own.scale", "own.shift", "own.features"):
            assert not torch.equal(one[name], two[name]), name


class Linears(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Linear(8, 6))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 7)


class Ruled(Linears):
    def init_rule(self, name):
        return Init("constant", 2.0)


def test_a_model_with_rules_starts_by_them(tmp_path):
    with start_run("build", options(tmp_path), Layout().fit(1)) as run:
        state = state_of(build_model(run, Ruled, Plan({}, fsdp_units=())))
    for tensor in state.values():
        assert (tensor == 2).all()


# ---- weights=


def test_weights_come_from_a_state_dict(tmp_path):
    expected = {name: tensor + 1 for name, tensor in plain()[0].state_dict().items()}
    torch.save(expected, tmp_path / "model.pt")
    torch.save(expected, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, tmp_path / "model.safetensors")
    files = [tmp_path / name for name in ("model.pt", "old.bin", "model.safetensors")]
    sources = [expected, *files, str(files[0])]
    for state in alone(tmp_path / "run", *({"weights": source} for source in sources)):
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.norm(self.tokens(x)))


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def test_a_tied_weight_needs_one_of_its_names():
    state = Tied().state_dict()
    for incomplete in (without(state, "head.weight"), without(state, "tokens.weight"), state):
        with meta_parameters():
            model = Tied()
        materialize(model, CPU, 0, values=loaded_values(model, incomplete))
        assert torch.equal(model.tokens.weight, state["tokens.weight"])
        assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, "norm.bias"), r"norm\.bias"),
        (lambda s: without(s, "norm.running_var"), r"norm\.running_var"),
        (lambda s: without(s, "tokens.weight", "head.weight"), r"tokens\.weight, head\.weight"),
        (lambda s: {**s, "more": torch.ones(1)}, "Tied has no more"),
        (lambda s: {**s, "norm.bias": torch.ones(4)}, r"norm\.bias"),
        (lambda s: {**s, "norm.bias": torch.ones(3, dtype=torch.complex64)}, r"norm\.bias is of torch\.complex64"),
        (lambda s: {**s, "head.weight": torch.ones(5, 3)}, r"tokens\.weight and head\.weight"),
        (lambda s: {"model": s, "step": 3}, "OrderedDict"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with meta_parameters():
        model = Tied()
    with pytest.raises(ConfigError, match=message):
        materialize(model, CPU, 0, values=loaded_values(model, change(Tied().state_dict())))
