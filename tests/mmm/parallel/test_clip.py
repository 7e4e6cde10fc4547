"""Clipping by the norm of the whole gradient, of every kind of gradient at once."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mmm.parallel import Layout, build_mesh, clip_grad_norm

# Some have rows that ranks divide, others not.
SHAPES = [(5, 3), (7,), (6, 2), (4, 4), (1, 8)]


def whole_parameters():
    rng = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
    return parameters


def clip_mixed(rank, max_norm):
    """Plain; sharded over dp, unevenly; over dp and tp; over dp alone on that mesh; replicated. One has no gradient."""
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu")
    kinds = [
        None,
        (mesh["dp_shard"], [Shard(0)]),
        (mesh.device_mesh, [Shard(0), Shard(1)]),
        (mesh.device_mesh, [Shard(0), Replicate()]),
        (mesh["tp"], [Replicate()]),
    ]
    parameters = []
    for full, kind in zip(whole_parameters(), kinds, strict=True):
        cut = full if kind is None else nn.Parameter(distribute_tensor(full.data, *kind))
        cut.grad = full.grad if kind is None else distribute_tensor(full.grad, *kind)
        parameters.append(cut)
    parameters.append(nn.Parameter(torch.ones(2)))
    norm = clip_grad_norm(iter(parameters), max_norm)
    gradients = [p.grad if kind is None else p.grad.full_tensor() for p, kind in zip(parameters, kinds, strict=False)]
    return norm, gradients


@pytest.mark.parametrize("max_norm", [0.7, 1e3, math.inf])
def test_mixed_kinds(run_on_ranks, max_norm):
    parameters = whole_parameters()
    expected = nn.utils.clip_grad_norm_(parameters, max_norm)
    for norm, gradients in run_on_ranks(clip_mixed, 4, max_norm):
        assert type(norm) is torch.Tensor
        assert norm.item() == pytest.approx(expected.item(), rel=1e-13)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-13, atol=0)


def clip_not_finite(rank, value):
    """One element that is not finite, of a gradient sharded over both axes: it is on one rank alone."""
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu")
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh.device_mesh, cut))
        for cut in ([Replicate(), Replicate()], [Shard(0), Shard(1)])
    ]
    for parameter in parameters:
        parameter.grad = distribute_tensor(torch.ones(4, 4), mesh.device_mesh, parameter.placements)
    if rank.rank == 3:
        parameters[1].grad.to_local()[1, 1] = value
    return clip_grad_norm(parameters, 1.0).item()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_so_on_every_rank(run_on_ranks, value):
    """A run that ends by it, or a loss scaler that skips the step, does so on all ranks."""
    assert [repr(norm) for norm in run_on_ranks(clip_not_finite, 4, value)] == [repr(value)] * 4


def over_stages(rank):
    """Each stage has one parameter; the norm is of all of them."""
    mesh = build_mesh(Layout(pp=2, dp_shard=1), "cpu")
    own_parameters = whole_parameters()[rank.rank]
    return clip_grad_norm([own_parameters], 0.5, stages=mesh["pp"]).item(), own_parameters.grad


def test_pipeline_stages(run_on_ranks):
    parameters = whole_parameters()[:2]
    expected = nn.utils.clip_grad_norm_(parameters, 0.5).item()
    for (norm, gradient), parameter in zip(run_on_ranks(over_stages, 2), parameters, strict=True):
        assert norm == pytest.approx(expected, rel=1e-13)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-13, atol=0)


def test_nothing_to_clip():
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_a_norm_of_half_precision_does_not_overflow():
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 40_000.0, dtype=torch.float16)
    assert clip_grad_norm([parameter], 1.0).item() == pytest.approx(80_000.0, rel=1e-4)
    assert parameter.grad.float() == pytest.approx([0.5] * 4, rel=1e-3)


def test_refused():
    with pytest.raises(ValueError, match="max_norm 0"):
        clip_grad_norm([], 0)
