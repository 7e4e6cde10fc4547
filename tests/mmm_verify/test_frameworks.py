"""The adapters that come with the package, with a stand-in for the framework's module of process groups."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mmm_verify import verify
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
