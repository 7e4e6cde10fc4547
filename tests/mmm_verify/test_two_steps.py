"""What one step hides: a second one, gradients before they are clipped, and the norm that each rank clips by."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from mmm_verify import verify
from mmm_verify.audit import applying
from support.by_hand import add_up, averaged, nothing

# Before PyTorch 2.10 the clipping itself is wrong, and said to be so.
ADVISED = [entry["id"] for entries in applying().values() for entry in entries]
OF_SHARDS = pytest.mark.skipif("torch-clip-sharded" in ADVISED, reason="this PyTorch cannot do it: mmm-verify audit")


def fields():
    return torch.randn(8, 3), torch.randn(8, 2)


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def shard(model, mesh):
    fully_shard(model, mesh=mesh)


def average_in_the_first_step(model, mesh):
    """As a program that counts its micro-batches wrongly from the second step on."""
    steps = []
    model.register_forward_pre_hook(lambda module, args: steps.append(1))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad.div_(mesh.size())) if len(steps) == 1 else None
        )


def synchronize_once(model, mesh):
    fully_shard(model, mesh=mesh)
    steps = []

    def count(module, args):
        steps.append(1)
        module.set_requires_gradient_sync(len(steps) == 1)

    model.register_forward_pre_hook(count)


def twice_from_the_second_on(model, mesh):
    steps = []
    model.register_forward_pre_hook(lambda module, args: steps.append(1))
    averaged(model, mesh)
    model[0].bias.register_hook(lambda grad: grad * (1 if len(steps) == 1 else 2))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def rows_by_hand(model, mesh):
    """The last matrix is sharded by rows, without a bias of its own on each rank."""
    rank = mesh.get_rank()
    model[2].weight = nn.Parameter(model[2].weight.detach().chunk(2)[rank].clone())
    model[2].bias = nn.Parameter(model[2].bias.detach().chunk(2)[rank].clone())
    add_up(model[0], mesh)


def compute(model, batch, mesh, rows=False):
    """Gradients, and the loss."""
    inputs, targets = batch
    if mesh is not None and rows:
        own = targets.chunk(2, -1)[mesh.get_rank()]
        loss = (model(inputs) - own).square().sum() / targets.numel()
    else:
        loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def clips(model, batch):
    loss = compute(model, batch, None)
    clip_grad_norm_(model.parameters(), 0.1)
    return loss


def clips_nothing(model, batch):
    loss = compute(model, batch, None)
    clip_grad_norm_(model.parameters(), 100.0)
    return loss


def clips_by_hand(model, batch, mesh, norm_of=None):
    loss = compute(model, batch, None)
    parameters = list(model.parameters()) if mesh is None or norm_of is None else norm_of(model)
    norm = sum(p.grad.square().sum() for p in parameters).sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_(0.1 / (norm + 1e-6))
    return loss


def clips_otherwise(model, batch, mesh):
    """By PyTorch's function on one device, by hand on the ranks."""
    if mesh is None:
        return clips(model, batch)
    return clips_by_hand(model, batch, mesh)


def clips_first_and_averages_then(model, batch, mesh):
    """Each rank would clip by a norm of its own, once one is above the largest."""
    loss = clips_nothing(model, batch)
    if mesh is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.div_(mesh.size()))
    return loss


def norm_of_rows(model, batch, mesh, reduces=True):
    """A norm over shards: the squares of what is sharded are added up over the ranks."""
    loss = compute(model, batch, mesh, rows=True)
    if mesh is None:
        clip_grad_norm_(model.parameters(), 0.1)
        return loss
    squares = sum(p.grad.square().sum() for p in model[2].parameters())
    if reduces:
        dist.all_reduce(squares)
    norm = (squares + sum(p.grad.square().sum() for p in model[0].parameters())).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return loss


norm_of_own_rows = partial(norm_of_rows, reduces=False)
leaves_out_the_last_bias = partial(clips_by_hand, norm_of=lambda model: list(model.parameters())[:3])


def counts_what_is_whole_twice(model, batch, mesh):
    loss = compute(model, batch, mesh, rows=True)
    if mesh is None:
        clip_grad_norm_(model.parameters(), 0.1)
        return loss
    squares = sum(p.grad.square().sum() for p in model.parameters())
    dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, squares.sqrt())
    return loss


def wrong_norm_of_rank_1(model, batch, mesh):
    loss = compute(model, batch, None)
    parameters = list(model.parameters())
    left_out = 1 if mesh is not None and mesh.get_rank() == 1 else 0
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters[left_out:]])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return loss


@pytest.mark.parametrize(
    ("mesh", "parallelize", "step", "optimizer"),
    [
        ("dp2", shard, None, adamw),
        ("dp2", averaged, clips, None),
        pytest.param("dp2", shard, clips, adamw, marks=OF_SHARDS),
        ("dp2", averaged, clips_nothing, None),
        ("dp2", averaged, clips_by_hand, adamw),
        ("dp2", averaged, clips_otherwise, None),
        ("tp2", rows_by_hand, norm_of_rows, None),
    ],
)
def test_right(mesh, parallelize, step, optimizer):
    verdict = verify(net, parallelize, fields, step, mesh, optimizer_fn=optimizer)
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert "step 2" in verdict.compared
    if step is clips:
        assert not verdict.notes, verdict


@pytest.mark.parametrize(
    ("mesh", "parallelize", "step", "optimizer", "stage", "says"),
    [
        ("dp2", average_in_the_first_step, None, None, "step 2", "second step.*each dp rank kept its own"),
        ("dp2", synchronize_once, None, None, "step 2", "second step"),
        ("dp2", twice_from_the_second_on, None, adamw, "step 2", "gradient of 0.bias.*2 times"),
        ("dp2", add_up, clips, adamw, "gradients", r"every gradient.*2 times \(the size of dp\)"),
        ("tp2", rows_by_hand, norm_of_own_rows, None, "gradients", "on rank 0.*: rank 0 counted only its own parts"),
        ("tp2", rows_by_hand, counts_what_is_whole_twice, None, "gradients", "counted what is not sharded 2 times"),
        ("dp2", nothing, clips_first_and_averages_then, None, "gradients", "norm that the step clips by on rank 0"),
        ("dp2", averaged, leaves_out_the_last_bias, None, "gradients", "rank 0 left out 2.bias"),
        ("dp2", averaged, wrong_norm_of_rank_1, None, "gradients", "on rank 1: 0.7.* times.*rank 1 left out 0.weight"),
    ],
)
def test_wrong(mesh, parallelize, step, optimizer, stage, says):
    verdict = verify(net, parallelize, fields, step, mesh, optimizer_fn=optimizer)
    assert verdict.exit_code == 1, str(verdict)
    assert verdict.findings[0].stage == stage, str(verdict)
    assert re.search(says, str(verdict)[str(verdict).find("first difference:") :], re.DOTALL), verdict


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    # Tied: one parameter under two names.
    model[2].weight = model[0].weight
    return model


def test_a_tied_weight_counts_once_in_the_norm():
    leaves_out = partial(clips_by_hand, norm_of=lambda model: list(model.parameters())[:-1])

    def step(model, batch, mesh):
        if mesh is None:
            return clips(model, batch)
        return leaves_out(model, batch, mesh)

    verdict = verify(tied, averaged, fields, step, "dp2")
    assert verdict.exit_code == 1
    assert "rank 0 left out 3.bias" in str(verdict), verdict


class Autocast(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_autocast_and_clipping_by_hand_are_said():
    verdict = verify(lambda: Autocast(3, 2), averaged, fields, mesh="dp2")
    assert verdict.same
    assert "autocast is on in the step, and does nothing to float64" in str(verdict)
    verdict = verify(net, averaged, fields, clips_by_hand, mesh="dp2")
    assert "the gradient of a batch is not the mean of its parts' gradients, as where the step clips it" in str(verdict)


def test_digits_of_a_factor_near_1():
    def scaled(model, mesh):
        averaged(model, mesh)
        # Less than float32 can show.
        model[0].weight.register_hook(lambda grad: grad * (1 + 3e-8))

    verdict = verify(net, scaled, fields, mesh="dp2")
    assert verdict.exit_code == 1
    assert re.search(r"0.weight on rank 0: 1\.00000003(00\d*)? times what it should be", str(verdict)), verdict


class Shifted(nn.Module):
    """A softmax takes no notice of what is added to all: the gradient of `bias` is nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.body(x) + self.bias).softmax(-1)


def test_an_optimizer_that_steps_by_rounding():
    def without_eps(parameters):
        # A gradient of rounding is divided by its own size.
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-15, foreach=False)

    verdict = verify(Shifted, averaged, fields, mesh="dp2", optimizer_fn=without_eps)
    assert verdict.same, str(verdict)
