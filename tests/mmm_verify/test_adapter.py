"""Made-up frameworks: gradients in `main_grad`, names of their own, padded shards, empty parameters, engines that step.

An `Adapter` tells `verify` about them, and `verify` finds their mistakes.
"""

import contextlib
import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mmm_verify import Adapter, verify
from mmm_verify.command import main
from support.by_hand import averaged, copy, gather

RATE = 0.1
ROWS = 3
COLUMNS = 4


def make_model():
    return nn.Sequential(nn.Linear(COLUMNS, 2 * ROWS), nn.Linear(2 * ROWS, 2))


def make_batch():
    return torch.randn(8, COLUMNS), torch.randn(8, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=RATE)


class PaddedShard(nn.Module):
    """A rank's rows of a matrix, with a row and a column of padding behind them."""

    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        first = dist.get_rank(group) * ROWS
        rows = slice(first, first + ROWS)
        self.kernel = nn.Parameter(F.pad(linear.weight.detach()[rows], (0, 1, 0, 1), value=7.0))
        self.bias = nn.Parameter(F.pad(linear.bias.detach()[rows], (0, 1), value=7.0))

    def forward(self, x):
        out = F.linear(copy(x, self.group), self.kernel[:ROWS, :COLUMNS], self.bias[:ROWS])
        return gather(out, self.group)


class Engine:
    """Accumulates gradients in `main_grad`, takes their mean over dp, and steps by them."""

    def __init__(self, model, group, mistake=""):
        assert os.environ.get("ACME") == "on"
        self.parameters = list(model.parameters())
        self.group = group
        self.mistake = mistake
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(self.accumulate)

    def accumulate(self, parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def backward(self, loss):
        loss.backward()
        for parameter in self.parameters:
            # The bias of the last layer, which a wrong engine forgets.
            if self.mistake != "forgets one" or parameter.shape != (2,):
                dist.all_reduce(parameter.main_grad.div_(self.group.size()), group=self.group)

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= RATE * parameter.main_grad

    def zero_grad(self):
        if self.mistake != "keeps gradients":
            for parameter in self.parameters:
                parameter.main_grad.zero_()


def acme(model, mesh, mistake=""):
    shard = PaddedShard(model[0], mesh.get_group("tp"))
    program = nn.ModuleDict({"encoder": shard, "head": model[1]})
    return program, Engine(program, mesh.get_group("dp"), mistake)


def forgets_one(model, mesh):
    return acme(model, mesh, "forgets one")


def keeps_gradients(model, mesh):
    return acme(model, mesh, "keeps gradients")


def step(program, batch, mesh):
    x, y = batch
    if mesh is None:
        return F.mse_loss(program(x), y)
    modules, engine = program
    loss = F.mse_loss(modules["head"](modules["encoder"](x)), y)
    engine.backward(loss)
    return loss


@contextlib.contextmanager
def environment(rank, mesh):
    before = os.environ.get("ACME")
    os.environ["ACME"] = "off" if mesh is None else "on"
    yield
    os.environ.pop("ACME")
    assert before is None


# The names of a framework, and those of the plain model.
NAMES = {"encoder.kernel": "0.weight", "encoder.bias": "0.bias", "head.weight": "1.weight", "head.bias": "1.bias"}


def name(rank, name):
    return NAMES.get(name, name)


def place(name, tensor):
    if not name.startswith("encoder"):
        return None
    # tp is the inner axis. Row 6 and column 4 do not exist: they are padding.
    first = dist.get_rank() % 2 * ROWS
    rows = [*range(first, first + ROWS), 2 * ROWS]
    if tensor.ndim == 1:
        return [rows]
    return rows, range(COLUMNS + 1)


def gradients(program):
    modules, _ = program
    return {name: parameter.main_grad for name, parameter in modules.named_parameters()}


ADAPTER = Adapter(environment=environment, gradients=gradients, name=name, place=place)


def check(parallelize=acme, adapter=ADAPTER):
    return verify(make_model, parallelize, make_batch, step, "dp2,tp2", optimizer_fn=sgd, adapter=adapter)


def test_right():
    verdict = check()
    assert verdict, verdict
    assert verdict.compared["weights"].startswith("same: 4 tensors")
    assert "padded" in " ".join(verdict.notes)


@pytest.mark.parametrize(
    ("parallelize", "stage", "tensor", "relation"),
    [
        (forgets_one, "gradients", "1.bias", "missing all-reduce over dp"),
        (keeps_gradients, "step 2", "", ""),
    ],
)
def test_mistakes_of_the_framework(parallelize, stage, tensor, relation):
    verdict = check(parallelize)
    assert verdict.result == "not the same"
    assert verdict.findings[0].stage == stage
    assert tensor in verdict.findings[0].name
    assert relation in verdict.findings[0].relation


def test_wrong_place():
    """A place that an adapter tells is compared with the weights, and not believed."""

    def swapped(name, tensor):
        shard = place(name, tensor)
        if shard is None:
            return None
        first, *others = shard
        # Its first two entries change places.
        return [[*first[1::-1], *first[2:]], *others]

    verdict = check(adapter=replace(ADAPTER, place=swapped))
    assert verdict.findings[0].stage == "weights"
    assert verdict.findings[0].name in ("0.weight", "0.bias")


@pytest.mark.long
@pytest.mark.parametrize("missing", ["gradients", "name", "place"])
def test_without_a_function(missing):
    """What verify cannot find by itself is not comparable. The framework is not accused."""
    verdict = check(adapter=replace(ADAPTER, **{missing: None}))
    assert verdict.result == "not comparable", verdict


def fails(program):
    raise RuntimeError("no engine")


@pytest.mark.parametrize(
    ("function", "value", "reason"),
    [
        ("gradients", fails, "its gradients raises RuntimeError: no engine"),
        ("gradients", lambda program: {"kernel": None}, "returns kernel, which the program has not"),
        ("gradients", lambda program: [], "returns list"),
        ("place", lambda name, tensor: ([0, 1],), "indices for (2,) elements"),
    ],
)
def test_wrong_adapter(function, value, reason):
    verdict = check(adapter=replace(ADAPTER, **{function: value}))
    assert verdict.result == "not comparable", verdict
    assert reason in verdict.reason


class Freed(nn.Module):
    """A model whose parameters are empty: their values are elsewhere, as under ZeRO 3 between uses."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = torch.empty(0)

    def forward(self, x):
        return torch.func.functional_call(self.model, self.values, (x,))

    def gradients(self):
        return {f"model.{name}": value.grad for name, value in self.values.items()}

    def weights(self):
        return {f"model.{name}": value for name, value in self.values.items()}


class FreedOptimizer:
    def __init__(self, program):
        self.program = program
        self.zero_grad = program.zero_grad

    def step(self):
        with torch.no_grad():
            for value in self.program.values.values():
                dist.all_reduce(value.grad.div_(2))
                value -= RATE * value.grad
                value.grad = None


def freed(model, mesh):
    program = Freed(model)
    return program, FreedOptimizer(program)


def freed_step(program, batch, mesh):
    x, y = batch
    if mesh is None:
        return F.mse_loss(program(x), y)
    loss = F.mse_loss(program[0](x), y)
    loss.backward()
    return loss


def means(program):
    # All ranks are here at the same time, so an adapter may communicate.
    return {name: mean_over_ranks(gradient) for name, gradient in program[0].gradients().items()}


def mean_over_ranks(gradient):
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


FREED = Adapter(gradients=means, weights=lambda program: program[0].weights())


def test_weights_and_gradients_elsewhere():
    verdict = verify(make_model, freed, make_batch, freed_step, "dp2", adapter=FREED)
    assert verdict, verdict
    assert verdict.compared["weights"].startswith("same: 4 tensors")


def test_weights_that_are_rounded_on_their_way():
    """They do not change before the optimizer's step: the parameters themselves are what is looked at."""

    def rounded(program):
        model = program[0] if isinstance(program, tuple) else program
        return {name: parameter.float().double() for name, parameter in model.named_parameters()}

    verdict = verify(make_model, with_sgd, make_batch, freed_step, "dp2", adapter=Adapter(weights=rounded))
    assert verdict.result == "rounded to float32", verdict


def test_weights_elsewhere_that_do_not_step():
    def stale(model, mesh):
        program, optimizer = freed(model, mesh)
        optimizer.program = Freed(make_model())
        return program, optimizer

    verdict = verify(make_model, stale, make_batch, freed_step, "dp2", adapter=FREED)
    assert verdict.result == "not the same"


def with_sgd(model, mesh):
    averaged(model, mesh)
    return model, sgd(model.parameters())


def with_adamw(model, mesh):
    averaged(model, mesh)
    return model, adamw(model.parameters())


def test_own_optimizer():
    """Its steps are compared with those of --optimizer. verify's own SGD would say nothing about it."""

    assert verify(make_model, with_adamw, make_batch, None, "dp2", optimizer_fn=adamw)
    verdict = verify(make_model, with_adamw, make_batch, None, "dp2")
    assert verdict.result == "not comparable", verdict
    assert "AdamW" in verdict.reason
    assert "--optimizer" in verdict.reason


def test_an_error_that_shows_a_dtensor_is_not_one_of_dtypes():
    def raises(model, mesh):
        raise RuntimeError("operands must have the same mesh: TensorMeta(shape=torch.Size([]), dtype=torch.float64)")

    verdict = verify(make_model, raises, make_batch, None, "dp2")
    assert verdict.result == "not the same"
    assert "the same mesh" in verdict.first


def test_gradients_that_are_kept():
    """An own optimizer that does not set gradients to None, and one that does not set them to 0 either."""

    def keeps(model, mesh):
        averaged(model, mesh)
        optimizer = sgd(model.parameters())
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)
        return model, optimizer

    def adds_up(model, mesh):
        model, optimizer = keeps(model, mesh)
        optimizer.zero_grad = lambda: None
        return model, optimizer

    assert verify(make_model, keeps, make_batch, None, "dp2", optimizer_fn=sgd)
    verdict = verify(make_model, adds_up, make_batch, None, "dp2", optimizer_fn=sgd)
    assert verdict.findings[0].stage == "step 2"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("acme", "--adapter acme: the frameworks known are "),
        ("mlp:forward", "mlp has no forward"),
        ("mlp:make_model", "it is function, and has to be an mmm_verify.Adapter"),
    ],
)
def test_command(spec, reason, tmp_path, monkeypatch, capsys):
    (tmp_path / "mlp.py").write_text("def make_model():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mlp", raising=False)
    assert main(["mlp:make_model", "--parallelize", "mlp:make_model", "--adapter", spec]) == 2
    assert reason in capsys.readouterr().err
