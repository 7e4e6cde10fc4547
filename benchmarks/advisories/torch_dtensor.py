"""Operators on DTensors, as tensor parallelism makes them: the columns of a layer are on different ranks."""

from torch import nn, randn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class Model(nn.Sequential):
    def __init__(self, operator):
        super().__init__(nn.Linear(8, 8))
        self.operator = operator

    def forward(self, x):
        y = self.operator(self[0](x))
        return y.full_tensor() if isinstance(y, DTensor) else y


def shares_of_more():
    # a number is added to a sum over ranks
    return Model(lambda y: y / (y.square().sum(-1, keepdim=True) + 1))


def shares():
    """The control."""
    return Model(lambda y: y / y.square().sum(-1, keepdim=True))


def make_batch():
    return randn(4, 8)


def step(model, batch):
    return model(batch).square().mean()


def parallelize(model, mesh):
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
