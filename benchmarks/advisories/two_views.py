"""A model of images of which there are two views, in DDP: what losses over the images of all ranks are tried with."""

from torch import nn, randn


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_batch():
    """Two views of 8 images."""
    return randn(8, 8), randn(8, 8)


def parallelize(model, mesh):
    return nn.parallel.DistributedDataParallel(model)
