"""Operators on DTensors, as tensor parallelism makes them: the columns of a layer are on different ranks."""

from torch import nn, randn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Model(nn.Sequential):
    def __init__(self, operator, columns=8):
        super().__init__(nn.Linear(8, columns))
        self.operator = operator

    def forward(self, x):
        y = self.operator(self[0](x))
        return y.full_tensor() if isinstance(y, DTensor) else y


def shares_of_more():  # a number is added to a sum over ranks
    return Model(lambda y: y / (y.square().sum(-1, keepdim=True) + 1))


def shares():
    """The control."""
    return Model(lambda y: y / y.square().sum(-1, keepdim=True))


def centered(columns=7):  # a mean over columns, of which one rank has 4, and the other one 3
    return Model(lambda y: y - y.mean(-1, keepdim=True), columns)


def centered_even():
    """The control."""
    return centered(8)


def wrap_again(y):
    return DTensor.from_local(y.to_local(), y.device_mesh, y.placements) if isinstance(y, DTensor) else y


def energy_of_parts():  # a sum over ranks is unwrapped and wrapped, as by a function that takes plain tensors
    return Model(lambda y: wrap_again((y.square() / 8).sum(-1)).exp())


def energy():
    """The control."""
    return Model(lambda y: (y.square() / 8).sum(-1).exp())


def make_batch():
    return randn(4, 8)


def step(model, batch):
    return model(batch).square().mean()


def parallelize(model, mesh):
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
