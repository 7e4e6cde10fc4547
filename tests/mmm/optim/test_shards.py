"""PyTorch's optimizers in a loop of one's own: they update local tensors, and the result is that of full ones."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmm.optim.adamw import ELEMENTWISE, update_shards

STEPS = 3


class OperationsOfDTensors(TorchDispatchMode):
    """Names of what is computed on DTensors."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def train(kind, sharded):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    if sharded:
        fully_shard(model)
    optimizer = kind(model.parameters(), lr=0.01)
    if sharded:
        update_shards(optimizer)
        update_shards(optimizer)
    seen = OperationsOfDTensors()
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(step)
        model(torch.randn(5, 6, generator=numbers, dtype=torch.float64)).square().mean().backward()
        with seen:
            optimizer.step()
        optimizer.zero_grad()
    if not sharded:
        return [parameter.detach() for parameter in model.parameters()], seen.names
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert states
    assert all(isinstance(value, DTensor) for value in states)
    return [parameter.full_tensor() for parameter in model.parameters()], seen.names


def both(rank, kind):
    weights, names = train(kind, sharded=True)
    expected, _ = train(kind, sharded=False)
    for own, plain in zip(weights, expected, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=0)
    return names


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_the_update_is_of_local_tensors(run_on_ranks, kind):
    for names in run_on_ranks(both, 2, kind):
        assert not names - {"zeros_like", "full_like", "empty_like", "detach", "ones_like"}


def partial_gradient(rank, kind, name):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.full((3,), rank.rank - 0.25), mesh, [Partial()])
    optimizer = kind([parameter], lr=0.5)
    update_shards(optimizer)
    optimizer.step()
    return optimizer.state[parameter][name].to_local().tolist()


def test_a_partial_gradient_is_summed_first(run_on_ranks):
    assert run_on_ranks(partial_gradient, 2, torch.optim.Adagrad, "sum") == [[0.25] * 3] * 2  # (-0.25 + 0.75) squared
