"""AdamW on local tensors: bit for bit PyTorch's on DTensors, whose dispatch it leaves out."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmm.optim.adamw import make_optimizer
from mmm.parallel import Layout, build_mesh
from mmm.parallel.local import to_local

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
    numbers = torch.Generator().manual_seed(0)
    kinds = [None, (mesh["tp"], [Shard(0)]), (mesh.device_mesh, [Shard(0), Shard(0)])]
    kinds += [(mesh.device_mesh, [Shard(0), Shard(1)]), (mesh.device_mesh, [Shard(0), Replicate()])]
    parameters = []
    for shape, kind in zip(SHAPES, kinds, strict=True):
        full = torch.randn(shape, generator=numbers)
        parameters.append(nn.Parameter(full if kind is None else distribute_tensor(full, *kind)))
    optimizer = make(parameters)
    for _ in range(3):
        for parameter, kind in zip(parameters, kinds, strict=True):
            gradient = torch.randn(parameter.shape, generator=numbers)
            parameter.grad = gradient if kind is None else distribute_tensor(gradient, *kind)
        with OnDTensors() as seen:
            optimizer.step()
    state = [value for p in parameters for value in optimizer.state[p].values()]
    return [to_local(each.detach()) for each in (*parameters, *state)], seen.names, [type(each) for each in state]


def both(rank):
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", 30)
    ours = updated(mesh, lambda parameters: make_optimizer("adamw", parameters, 0.1))

    def plain(parameters):
        groups = [{"params": [p]} for p in parameters]
        return torch.optim.AdamW(groups, lr=0.1, fused=True)

    return ours, updated(mesh, plain)


def test_bit_for_bit_as_on_dtensors(run_on_ranks):
    for (found, names, kinds), (expected, plain_names, plain_kinds) in run_on_ranks(both, 4):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert kinds == plain_kinds  # of a DTensor the state is one too
        assert names == []
        assert plain_names  # what is left out


def test_weight_decay_on_matrices_alone():
    """With gradients of 0 a step is the decay alone."""

    def factors(*given):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (3,), (2, 2, 2))]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        make_optimizer("adamw", parameters, 0.5, *given).step()
        return [parameter.flatten()[0].item() for parameter in parameters]

    assert factors() == pytest.approx([1 - 0.5 * 0.01] * 3)  # PyTorch's
    assert factors(0.2) == pytest.approx([0.9] * 3)
    assert factors(0.2, "matrices") == pytest.approx([0.9, 1.0, 0.9])
    assert factors(None, "matrices") == pytest.approx([1 - 0.5 * 0.01, 1.0, 1 - 0.5 * 0.01])
