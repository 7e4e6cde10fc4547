"""The adapters that come with the package, with a stand-in for the framework's module of process groups."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mmm_verify import verify
from mmm_verify.errors import ConfigError
from mmm_verify.frameworks import load_adapter

CALLS = []


def initialize(tp, pp, context_parallel_size):
    CALLS.append({"tp": tp, "pp": pp, "cp": context_parallel_size})


@pytest.fixture
def megatron(monkeypatch):
    state = types.SimpleNamespace(initialize_model_parallel=initialize, destroy_model_parallel=CALLS.clear)
    core = types.ModuleType("megatron.core")
    core.parallel_state = state
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    forget(monkeypatch, "megatron")


def forget(monkeypatch, name):
    """The adapter is imported anew, and is not left behind with the stand-in."""
    module = types.ModuleType(f"mmm_verify.frameworks.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    del sys.modules[module.__name__]


def make_model():
    return nn.Linear(4, 2)


def make_batch():
    return torch.randn(8, 4), torch.randn(8, 2)


class MainGrad(nn.Module):
    """Takes the mean over dp of gradients in `main_grad`, and steps by them."""

    def __init__(self, model, group):
        super().__init__()
        self.module = model
        self.group = group
        # The sizes that Megatron's groups get, and the device on which it would put a buffer.
        assert CALLS == [{"tp": 2, "pp": 1, "cp": 1}]
        self.device = torch.cuda.current_device()

    def forward(self, x):
        return self.module(x)

    def average(self):
        for parameter in self.parameters():
            parameter.main_grad = torch.empty_like(parameter, device=self.device).copy_(parameter.grad)
            parameter.grad = None
            dist.all_reduce(parameter.main_grad.div_(self.group.size()), group=self.group)

    def zero_grad(self):
        pass


class Steps:
    def __init__(self, program):
        self.program = program

    @torch.no_grad()
    def step(self):
        for parameter in self.program.parameters():
            parameter -= 0.1 * parameter.main_grad

    def zero_grad(self):
        pass


def parallelize(model, mesh):
    program = MainGrad(model, mesh.get_group("dp"))
    return program, Steps(program)


def forgets_the_mean(model, mesh):
    program, steps = parallelize(model, mesh)
    # A group of one rank.
    program.group = mesh.get_group("pp")
    return program, steps


def step(program, batch, mesh):
    x, y = batch
    if mesh is None:
        return F.mse_loss(program(x), y)
    loss = F.mse_loss(program[0](x), y)
    loss.backward()
    program[0].average()
    return loss.detach()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def check(parallelize, mesh):
    return verify(make_model, parallelize, make_batch, step, mesh, optimizer_fn=sgd, adapter=load_adapter("megatron"))


def test_megatron(megatron):
    verdict = check(parallelize, "dp2,tp2")
    assert verdict, verdict
    wrong = check(forgets_the_mean, "pp1,dp2,tp2")
    assert wrong.findings[0].stage == "gradients"
    assert "missing all-reduce over dp" in wrong.findings[0].relation


@pytest.mark.parametrize("mesh", ["tp2,dp1", "dp2,ep1"])
def test_megatron_numbers_its_ranks_by_axis(megatron, mesh):
    """Under another order, its groups would not be those of the mesh."""
    verdict = check(parallelize, mesh)
    assert verdict.result == "not comparable"
    assert "megatron numbers ranks by the axes pp, dp, cp, tp" in verdict.reason


OPERATORS = {"deepspeed_shm_comm": True}


@pytest.fixture
def deepspeed(monkeypatch):
    package = types.ModuleType("deepspeed")
    package.ops = types.ModuleType("deepspeed.ops")
    package.ops.__compatible_ops__ = OPERATORS
    package.utils = types.ModuleType("deepspeed.utils")
    package.utils.safe_get_full_grad = lambda parameter: parameter.full_grad
    package.utils.safe_get_full_fp32_param = lambda parameter: parameter.full.float().double()
    for module in (package, package.ops, package.utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    forget(monkeypatch, "deepspeed")


class Engine(nn.Module):
    """Steps on the mean of gradients over dp, which its parameters have as an attribute, and not in ``grad``.

    With `empty`, parameters are so between steps, as under ZeRO 3.
    """

    def __init__(self, model, group, empty, mistake):
        super().__init__()
        assert not OPERATORS["deepspeed_shm_comm"]
        self.module = model
        self.group = group
        self.empty = empty
        self.mistake = mistake
        for index, parameter in enumerate(model.parameters()):
            parameter.full = parameter.detach().clone()
            if empty:
                parameter.ds_id = index
        self.release()

    def release(self):
        for parameter in self.parameters():
            if self.empty:
                parameter.data = torch.empty(0)
            else:
                parameter.data.copy_(parameter.full)

    def forward(self, x):
        values = {}
        for name, parameter in self.module.named_parameters():
            values[name] = parameter.full.clone().requires_grad_()
        self.values = values
        return torch.func.functional_call(self.module, values, (x,))

    def average(self):
        for name, parameter in self.module.named_parameters():
            parameter.full_grad = self.values[name].grad
            if not self.mistake:
                dist.all_reduce(parameter.full_grad.div_(self.group.size()), group=self.group)

    @torch.no_grad()
    def step_by_gradients(self):
        for parameter in self.parameters():
            parameter.full -= 0.1 * parameter.full_grad
        self.release()


class EngineSteps:
    def __init__(self, engine):
        self.step = engine.step_by_gradients

    def zero_grad(self):
        pass


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("mistake", [False, True])
def test_deepspeed(deepspeed, empty, mistake):
    def parallelize(model, mesh):
        engine = Engine(model, mesh.get_group("dp"), empty, mistake)
        return engine, EngineSteps(engine)

    adapter = load_adapter("deepspeed")
    verdict = verify(
        make_model, parallelize, make_batch, step, "dp2", optimizer_fn=sgd, adapter=adapter, dtype=torch.float32
    )
    assert OPERATORS["deepspeed_shm_comm"]
    if mistake:
        assert verdict.findings[0].stage == "gradients"
        assert "missing all-reduce over dp" in verdict.findings[0].relation
    else:
        assert verdict, verdict


def test_deepspeed_gradients_are_those_that_the_step_uses(deepspeed):
    """Of a scaled loss, they would be too large; BF16_Optimizer leaves only the last micro-batch in ``grad``."""
    engine = nn.Linear(1, 2)
    engine.optimizer = types.SimpleNamespace(loss_scale=4.0)
    engine.weight.full_grad = torch.ones(2, 1)
    engine.weight._hp_grad = torch.full((2,), 8.0)
    engine.bias.full_grad = torch.full((2,), 12.0)
    gradients = load_adapter("deepspeed").gradients((engine, EngineSteps))
    assert gradients["weight"].tolist() == [[2.0], [2.0]]
    assert gradients["bias"].tolist() == [3.0, 3.0]


def test_a_framework_that_is_not_installed():
    with pytest.raises(ConfigError, match=r"--adapter deepspeed: deepspeed is not installed in .*python"):
        load_adapter("deepspeed")
