"""Learning-rate schedules. --scale_lr: a learning rate that grows with the global batch, said in the record and used.
AdamW on local tensors: bit for bit PyTorch's on DTensors, whose dispatch it leaves out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mmm.history
from mmm.errors import ConfigError
from mmm.optim.adamw import make_optimizer
from mmm.parallel import Layout, build_mesh
from mmm.parallel.local import to_local
from mmm.run.command_line import configure
from mmm.trainer import cnn, lm, vit
from mmm.trainer.config import Optimizer
from mmm.trainer.rate import schedule_of, step_decay, warmup_cosine, warmup_stable_decay
from support.pool import program_on


def test_warmup_then_cosine():
    factor = warmup_cosine(steps=101, warmup=10)
    values = [factor(step) for step in range(101)]
    assert values[0] == pytest.approx(0.1)
    # The last step of the warm-up, and the first of the cosine.
    assert values[9] == values[10] == 1.0
    # Half way from 10 to 100.
    assert values[55] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0.0, abs=1e-12)
    assert max(values) == 1.0
    assert warmup_cosine(1, 0)(0) == 1.0


def test_warmup_stable_decay():
    factor = warmup_stable_decay(steps=20, warmup=4, decay=5)
    warmup = [0.25, 0.5, 0.75, 1.0]
    decay = [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    expected = [*warmup, *[1.0] * 11, *decay]
    assert [factor(step) for step in range(20)] == pytest.approx(expected)
    assert [warmup_stable_decay(3, 0, 0)(step) for step in range(3)] == [1.0] * 3


def test_the_least_rate():
    """What is left of 1 is `least` higher at its lowest, in proportion between."""
    for made in (lambda **least: warmup_cosine(20, 4, **least), lambda **least: warmup_stable_decay(20, 4, 9, **least)):
        plain = made()
        raised = made(least=0.1)
        assert [raised(step) for step in range(4)] == [plain(step) for step in range(4)]
        for step in range(4, 20):
            assert raised(step) == pytest.approx(0.1 + 0.9 * plain(step))
    assert warmup_cosine(20, 4, 0.1)(19) == pytest.approx(0.1)
    chosen = Optimizer(lr=2e-3, min_lr=2e-4)
    assert schedule_of(SimpleNamespace(note=print), 20, chosen)(19) == pytest.approx(0.1)


def test_the_schedule_that_the_flags_ask_for():
    notes = []
    run = SimpleNamespace(note=notes.append)
    wsd = Optimizer(warmup=10, lr_schedule="wsd")
    # a fifth
    long = schedule_of(run, 100, wsd)
    full = warmup_stable_decay(100, 10, 20)
    assert [long(step) for step in range(100)] == [full(step) for step in range(100)]
    cosine = schedule_of(run, 100, Optimizer(warmup=10))
    assert [cosine(step) for step in range(100)] == [warmup_cosine(100, 10)(step) for step in range(100)]
    assert notes == []
    short = schedule_of(run, 10, Optimizer(warmup=8, lr_schedule="wsd", decay=9))
    assert [short(step) for step in range(10)] == [warmup_stable_decay(10, 5, 5)(step) for step in range(10)]
    assert notes == [
        "warm-up: 5 steps, half of the 10 of this run: the 8 of --warmup do not fit",
        "decay: 5 steps, all that the warm-up leaves: the 9 of --decay do not fit",
    ]


def test_step_decay_is_steplr():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    factor = step_decay(steps_per_epoch=5, gamma=0.7)
    for epoch in range(4):
        assert factor(epoch * 5) == factor(epoch * 5 + 4) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


# Flags of a training that takes a second.
FLAGS = {
    "preset": "debug",
    "seq_length": 16,
    "max_iters": 3,
    "dtype": "fp64",
    "plots": False,
    "warmup": 0,
    "eval_batches": 1,
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("scale", "base", "batch", "rate"),
    [("none", None, 64, 0.1), ("linear", None, 64, 0.4), ("sqrt", None, 64, 0.2), ("linear", 256, 64, 0.025)],
)
def test_the_rate(scale, base, batch, rate):
    lr, notes = Optimizer(lr=0.1, scale_lr=scale, base_batch_size=base).scaled(batch, 16)
    assert lr == pytest.approx(rate)
    assert bool(notes) == (scale != "none")
    if notes:
        assert f"a global batch of 64 over a base of {base or 16}, {scale}" in notes[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"base_batch_size": 8}, "--base_batch_size 8 without --scale_lr"),
        ({"base_batch_size": 0, "scale_lr": "sqrt"}, "--base_batch_size 0"),
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, "--betas 0.9 0.99 with --optimizer"),
        ({"optimizer": "sgd", "decayed": "matrices"}, "--decayed"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        configure(lm.Config, **flags)


def test_every_trainer_has_it():
    """A base by default of what one rank has; digits have a global batch of their own."""
    shared = {"scale_lr": "linear", "global_batch_size": 64, "device": "cpu"}
    assert lm.resolve(configure(lm.Config, **{**FLAGS, **shared}, lr=0.1)).lr == pytest.approx(0.4)
    assert vit.resolve(configure(vit.Config, **shared, lr=0.1)).lr == pytest.approx(0.4)
    digits = cnn.resolve(configure(cnn.Config, **shared, dataset="digits", lr=0.1))
    assert digits.lr == pytest.approx(0.2)
    assert digits.describe()["scaled_lr"] == digits.lr


def run(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **{**FLAGS, **flags}, outdir=outdir))


def test_a_scaled_rate_has_the_same_losses_on_two_ranks(run_on_ranks, tmp_path):
    """The rate grows with the global batch, not with the ranks."""
    flags = {"optimizer": "sgd", "lr": 0.02, "max_norm": 0.5}
    flags |= {"scale_lr": "sqrt", "base_batch_size": 4, "global_batch_size": 8}
    lm.train(configure(lm.Config, **FLAGS, **flags, outdir=tmp_path / "one"))
    run_on_ranks(run, 2, tmp_path / "many", {**flags, "tpsize": 2})
    one, many = (mmm.history.load(tmp_path / name) for name in ("one", "many"))
    for name in ("loss", "val_loss", "grad_norm"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-9)
    assert one.lr[0] == pytest.approx(flags["lr"] * 2**0.5)


SHAPES = [(5, 3), (7,), (6, 2), (4, 4), (1, 8)]


class OnDTensors(TorchDispatchMode):
    """Keeps the names of the operators that get a DTensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def updated(mesh, make):
    """Local tensors after 3 steps, of parameters and state; what the last step asked DTensor for; kinds of state."""
    rng = torch.Generator().manual_seed(0)
    kinds = [None, (mesh["tp"], [Shard(0)]), (mesh.device_mesh, [Shard(0), Shard(0)])]
    kinds += [(mesh.device_mesh, [Shard(0), Shard(1)]), (mesh.device_mesh, [Shard(0), Replicate()])]
    parameters = []
    for shape, kind in zip(SHAPES, kinds, strict=True):
        full = torch.randn(shape, generator=rng)
        parameters.append(nn.Parameter(full if kind is None else distribute_tensor(full, *kind)))
    optimizer = make(parameters)
    for _ in range(3):
        for parameter, kind in zip(parameters, kinds, strict=True):
            gradient = torch.randn(parameter.shape, generator=rng)
            parameter.grad = gradient if kind is None else distribute_tensor(gradient, *kind)
        with OnDTensors() as seen:
            optimizer.step()
    state = [value for p in parameters for value in optimizer.state[p].values()]
    return (
        [to_local(tensor.detach()) for tensor in (*parameters, *state)],
        seen.names,
        [type(tensor) for tensor in state],
    )


def both(rank):
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", 30)
    ours = updated(mesh, lambda parameters: make_optimizer("adamw", parameters, 0.1))

    def plain(parameters):
        groups = [{"params": [p]} for p in parameters]
        return torch.optim.AdamW(groups, lr=0.1, fused=True)

    return ours, updated(mesh, plain)


def test_bit_for_bit_as_on_dtensors(run_on_ranks):
    for (by_rank, names, kinds), (expected, plain_names, plain_kinds) in run_on_ranks(both, 4):
        for a, b in zip(by_rank, expected, strict=True):
            assert torch.equal(a, b)
        # Of a DTensor the state is one too.
        assert kinds == plain_kinds
        assert names == []
        # What is left out.
        assert plain_names


def test_weight_decay_on_matrices_alone():
    """With gradients of 0 a step is the decay alone."""

    def factors(*args):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (3,), (2, 2, 2))]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        make_optimizer("adamw", parameters, 0.5, *args).step()
        return [parameter.flatten()[0].item() for parameter in parameters]

    # PyTorch's
    assert factors() == pytest.approx([1 - 0.5 * 0.01] * 3)
    assert factors(0.2) == pytest.approx([0.9] * 3)
    assert factors(0.2, "matrices") == pytest.approx([0.9, 1.0, 0.9])
    assert factors(None, "matrices") == pytest.approx([1 - 0.5 * 0.01, 1.0, 1 - 0.5 * 0.01])
