"""A gradient that is still a partial sum is summed before AdamW uses it."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from mmm.optim.adamw import AdamW


def second_moment(rank):
    """After one step, where rank 0 has -0.25 of the gradient, and rank 1 has 0.75."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.full((3,), rank.rank - 0.25), mesh, [Partial()])
    optimizer = AdamW([parameter], betas=(0.9, 0.5))
    optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].to_local().tolist()


def test_a_partial_gradient_is_summed_first(run_on_ranks):
    # Half of the square of the sum, 0.5.
    assert run_on_ranks(second_moment, 2) == [[0.125] * 3] * 2
