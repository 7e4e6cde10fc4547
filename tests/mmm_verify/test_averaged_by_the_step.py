"""Programs whose ranks average gradients or weights inside of the optimizer's step: backward leaves each its own.

What counts is what the update used. `adamw` and `sgd` stand for the optimizers of `torch.optim`. The classes here are
as Horovod and others have them, around one of those.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mmm_verify import Adapter, verify


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def fields():
    return torch.randn(8, 3), torch.randn(8, 2)


sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
adamw = partial(torch.optim.AdamW, lr=1e-2)


def average(tensors, divisor=None, group=None):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= divisor or dist.get_world_size(group)


class Averaged(torch.optim.SGD):
    """Averages gradients, and then steps. No instance of SGD itself is made: PyTorch has no hooks in its step."""

    divisor = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            average([p.grad for p in group["params"]], self.divisor)
        super().step()


class Sums(Averaged):
    divisor = 1


class Engine:
    """Steps by `make`'s optimizer, with something before and after it, and frees the gradients if `frees`."""

    def __init__(self, make, model, before=None, after=None, frees=False):
        self.parameters = list(model.parameters())
        self.inner = make(self.parameters)
        self.before = before
        self.after = after
        self.frees = frees
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        if self.before:
            self.before([p.grad for p in self.parameters])
        self.inner.step()
        if self.after:
            self.after(self)
        if self.frees:
            self.inner.zero_grad()

    def zero_grad(self):
        self.inner.zero_grad()


def weights(engine, **settings):
    average(engine.parameters, **settings)


def weights_of_pairs(engine):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    weights(engine, group=groups[dist.get_rank() // 2])


def weights_every_second_step(engine):
    if engine.steps % 2 == 0:
        weights(engine)


def gradients_too_late(engine):
    average([p.grad for p in engine.parameters])


def with_engine(make, **settings):
    return lambda model, mesh: (model, Engine(make, model, **settings))


def with_hook(make, **settings):
    def parallelize(model, mesh):
        optimizer = make(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: average([p.grad for p in model.parameters()], **settings))
        return model, optimizer

    return parallelize


def with_own(kind):
    return lambda model, mesh: (model, kind(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("parallelize", "optimizer", "says"),
    [
        (with_own(Averaged), sgd, "as the optimizer's step leaves them"),
        (with_hook(adamw), adamw, "as the optimizer's step leaves them"),
        (with_engine(momentum, before=average), momentum, "as the optimizer's step leaves them"),
        (with_engine(adamw, before=average, frees=True), adamw, "the weights that the optimizer's step leaves decide"),
        (with_engine(sgd, after=weights), sgd, "the weights that the optimizer's step leaves decide"),
        # Momentum and weight decay are linear in the gradient: the mean of the ranks' weights is the right one.
        (with_engine(momentum, after=weights), momentum, "the weights that the optimizer's step leaves decide"),
    ],
)
def test_right(parallelize, optimizer, says):
    verdict = verify(net, parallelize, fields, mesh="dp2", optimizer_fn=optimizer)
    assert verdict.same, str(verdict)
    assert says in verdict.compared["gradients"]
    assert "step 2" in verdict.compared


@pytest.mark.parametrize(
    ("parallelize", "optimizer", "mesh", "stage", "says"),
    [
        (with_own(Sums), sgd, "dp2", "gradients", "2 times (the size of dp)"),
        # The gradients that AdamW gets are wrong by a factor, which its weights do not show.
        (with_hook(adamw, divisor=1), adamw, "dp2", "gradients", "2 times (the size of dp)"),
        (with_engine(sgd, before=partial(average, divisor=4), frees=True), sgd, "dp2", "step", "another number"),
        (with_engine(adamw, after=weights), adamw, "dp2", "step", "an optimizer other than SGD"),
        (with_engine(sgd, after=weights_every_second_step), sgd, "dp2", "gradients", "missing all-reduce over dp"),
        (with_engine(sgd, after=weights_of_pairs), sgd, "dp4", "gradients", "missing all-reduce over dp"),
        (with_engine(adamw, after=gradients_too_late), adamw, "dp2", "step", "differs"),
    ],
)
def test_wrong(parallelize, optimizer, mesh, stage, says):
    verdict = verify(net, parallelize, fields, mesh=mesh, optimizer_fn=optimizer)
    assert verdict.exit_code == 1, str(verdict)
    assert verdict.findings[0].stage == stage
    assert says in str(verdict)


class Scaled(nn.Module):
    """The gradient of `factor` is one number, which has one sign on all ranks: AdamW makes the same step of each."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.factor * x.square()


def test_an_optimizer_that_hides_what_was_not_averaged():
    def positive():
        return torch.rand(8, 2) + 1, torch.zeros(8, 2)

    verdict = verify(Scaled, with_engine(adamw), positive, mesh="dp2", optimizer_fn=adamw)
    assert verdict.exit_code == 1, str(verdict)
    assert "missing all-reduce over dp" in str(verdict)


def test_a_step_too_small_to_show_what_it_used():
    tiny = partial(torch.optim.SGD, lr=1e-30)
    verdict = verify(net, with_engine(tiny), fields, mesh="dp2", optimizer_fn=tiny)
    assert verdict.exit_code == 1, str(verdict)


class MainGrads:
    """Keeps gradients in `main_grad`, as Megatron does, and averages them in its step."""

    def __init__(self, model, divisor):
        self.model, self.divisor = model, divisor
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.move)

    def move(self, parameter):
        parameter.main_grad = parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.model.parameters():
            average([parameter.main_grad], self.divisor)
            parameter -= 0.1 * parameter.main_grad

    def zero_grad(self):
        pass


def loss_and_backward(program, batch, mesh):
    inputs, targets = batch
    model = program if mesh is None else program[0]
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(("divisor", "exit_code"), [(2, 0), (4, 1)])
def test_gradients_of_an_adapter(divisor, exit_code):
    def parallelize(model, mesh):
        return model, MainGrads(model, divisor)

    def main_grads(program):
        return {name: parameter.main_grad for name, parameter in program[0].named_parameters()}

    adapter = Adapter(gradients=main_grads)
    verdict = verify(net, parallelize, fields, loss_and_backward, "dp2", optimizer_fn=sgd, adapter=adapter)
    assert verdict.exit_code == exit_code, str(verdict)
    assert exit_code == 0 or "another number" in str(verdict)
