"""Programs as people write them: what `verify` takes as it is, what it says that it has not seen, what it refuses; what
ranks drop."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mmm_verify import verify
from mmm_verify.errors import UserError
from mmm_verify.propose.find import find_plan
from mmm_verify.subject import load_function, make_subject
from support.by_hand import averaged


def fields():
    return torch.randn(8, 3), torch.randn(8, 2)


class Masked(nn.Linear):
    """Has the causal mask of many a transformer, and a value for what is missing."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("missing", torch.tensor([1.0, float("nan")]))


class Drifting(Masked):
    def forward(self, x):
        with torch.no_grad():
            self.mask[0, 0] = x.mean()
        return super().forward(x)


class Scatter(nn.Linear):
    """Makes tensors in forward without a dtype; one softmax is NaN, of what is masked for all."""

    def __init__(self):
        super().__init__(3, 2)
        self.softmax = nn.Softmax(-1)

    def forward(self, x):
        # Both scores are -inf: their softmax is NaN.
        scores = torch.zeros(len(x), 2).index_fill_(1, torch.tensor([0, 1]), float("-inf"))
        weights = self.softmax(scores)
        rows = torch.arange(len(x))[:, None].expand(-1, 2)
        return torch.zeros(len(x), 2).scatter_add_(0, rows, super().forward(x)) + torch.where(weights > 0, weights, 0.0)


class Complex(nn.Module):
    """Begins with no imaginary part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.cfloat))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).real


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 2)

    def forward(self, x):
        return self.second(self.first(x))


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.Linear(3, 2))

    def forward(self, x):
        return self.inner(x)


class Rounds(nn.Linear):
    """Adds up in another order each time, as threads do."""

    calls = 0

    def forward(self, x):
        Rounds.calls += 1
        return super().forward(x) * (1 + 1e-15 * (Rounds.calls % 3))


class Root(nn.Linear):
    """Its gradient is not finite, as that of a distance of 0."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return torch.where(x[:, :2] > 9, super().forward(x * 0).sub(self.bias).sqrt(), 0.0)


def squared(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def of_the_second_alone(model, batch):
    F.mse_loss(model.second(batch[0]), batch[1]).backward()
    return squared(model, batch)


def second_only(model, batch):
    return F.mse_loss(model.second(batch[0]), batch[1])


def goes_backward(model, batch):
    loss = squared(model, batch)
    loss.backward()
    return loss


def in_a_dict(model, mesh):
    averaged(model, mesh)
    return {"model": model}


def from_a_dict(program, batch):
    return squared(program["model"] if isinstance(program, dict) else program, batch)


def wrapped(model, mesh):
    averaged(model, mesh)
    return {"models": [model]}


def noisy(model, batch):
    inputs, targets = batch
    noise = torch.randn(8, 3)[: len(inputs)]
    return F.mse_loss(model(inputs + noise), targets)


def explicit_float(model, batch):
    return F.linear(batch[0].float(), model.weight).sum()


ONE = nn.Linear(3, 2)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")


@pytest.mark.parametrize(
    ("model", "parallelize", "step"),
    [
        (Masked, averaged, None),
        (Scatter, averaged, None),
        (Complex, averaged, None),
        (Scripted, averaged, None),
        # One and the same model each time.
        (lambda: ONE, averaged, None),
        (lambda: Rounds(3, 2), averaged, None),
        (lambda: nn.Linear(3, 2), averaged, goes_backward),
        (lambda: nn.Linear(3, 2), in_a_dict, from_a_dict),
    ],
    ids=["masks", "no dtype, NaN inside", "complex", "scripted", "one model", "order of sums", "own backward", "dict"],
)
def test_right(model, parallelize, step):
    verdict = verify(model, parallelize, fields, step, "dp2")
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert not verdict.notes, verdict.notes


def test_finite_elements_of_a_mask_are_compared():
    verdict = verify(Drifting, averaged, fields, mesh="dp2")
    assert verdict.exit_code == 1
    assert [finding.name for finding in verdict.findings] == ["mask"]


@pytest.mark.parametrize(
    ("step", "mesh", "count", "note"),
    [
        (second_only, "dp2", 2, "first.weight and 1"),
        (squared, "workers2", 4, "samples.*--batch-axes"),
    ],
)
def test_what_is_not_seen_is_said(step, mesh, count, note):
    verdict = verify(Two, averaged if mesh == "dp2" else lambda model, mesh: None, fields, step, mesh)
    assert verdict.same, str(verdict)
    assert verdict.compared["gradients"].startswith(f"same: {count},")
    assert re.search(note, str(verdict)), verdict


@pytest.mark.parametrize(
    ("model", "step", "says"),
    [
        (Two, of_the_second_alone, "calls backward, and the loss that it returns can go backward once more"),
        (Two, lambda model, batch: {"loss": squared(model, batch)}, "the step's function returns dict"),
        (lambda: nn.Linear(3, 2), explicit_float, "float64"),
    ],
)
def test_refused(model, step, says):
    with pytest.raises(UserError, match=says):
        verify(model, averaged, fields, step, "dp2")


@pytest.mark.parametrize(
    ("model", "parallelize", "step", "says"),
    [
        (Two, averaged, noisy, "random numbers are drawn in evaluation mode too.*in the batch's function"),
        (Root, averaged, None, "the gradient of weight on one device is not finite"),
        (Two, wrapped, None, "--parallelize"),
    ],
)
def test_not_comparable(model, parallelize, step, says):
    verdict = verify(model, parallelize, fields, step, "dp2")
    assert not verdict.same
    assert re.search(says, str(verdict)), verdict


@pytest.mark.parametrize(
    ("model", "step", "says"),
    [
        (
            Two,
            lambda model, batch: model.second(model.first(batch[0])).sum(),
            "calls first and second of Two, and never",
        ),
        (Scripted, None, "torch.jit"),
    ],
)
def test_no_plan(model, step, says):
    with pytest.raises(UserError, match=says):
        find_plan([make_subject(model, lambda model, mesh: None, fields, step, "dp2")], "model", 60)


def test_a_model_in_place_of_its_function():
    with pytest.raises(UserError, match="is a Linear, and has to be a function"):
        load_function(f"{__name__}:ONE", "MODEL")


def kinds():
    """Atoms of three kinds, in two molecules: no rows of their own."""
    kind = torch.tensor([0, 1, 1, 2, 0, 0, 2, 1])
    return {"kind": kind, "target": torch.linspace(-1, 1, 8)}


def of_kinds(model, batch):
    return (model(batch["kind"]).squeeze(1) - batch["target"]).square().mean()


def halves(batch, mesh):
    return {name: tensor.chunk(2)[mesh.get_rank()] for name, tensor in batch.items()}


def overlapping(batch, mesh):
    return {name: tensor[mesh.get_rank() :][:4] for name, tensor in batch.items()}


@pytest.mark.parametrize(("local", "same"), [(halves, True), (overlapping, False)])
def test_samples_that_are_alike(local, same):
    verdict = verify(lambda: nn.Embedding(3, 1), averaged, kinds, of_kinds, "dp2", local_batch_fn=local)
    assert verdict.same is same, str(verdict)
    if not same:
        assert verdict.findings[0].stage == "batch"


def without_its_buffer(model, mesh):
    averaged(model, mesh)
    del model.mask


def test_a_buffer_that_is_gone_is_said():
    verdict = verify(Masked, without_its_buffer, fields, mesh="dp2")
    assert verdict.same, str(verdict)
    assert verdict.compared["weights"].startswith("same: 3 tensors")
    assert "note: the buffer mask is on no rank of the parallel program: it is not compared" in str(verdict)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def positions():
    """Samples of four positions."""
    return torch.randn(8, 4, 8), torch.randn(8, 4, 2)


def over_positions(model, mesh, seed=lambda rank: 7):
    torch.manual_seed(seed(mesh.get_rank()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(mesh.size())))


def seeded_apart(model, mesh):
    over_positions(model, mesh, lambda rank: rank)


def of_own_positions(model, batch, mesh):
    inputs, targets = batch
    if mesh is not None:
        rank = mesh.get_rank()
        inputs = inputs.chunk(2, 1)[rank]
        targets = targets.chunk(2, 1)[rank]
    return F.mse_loss(model(inputs), targets)


def tensor_parallel(model, mesh):
    parallelize_module(model.body, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(model, mesh):
    whole_outside = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
    )
    plan = {
        "body": whole_outside,
        "body.norm": SequenceParallel(),
        "body.up": ColwiseParallel(input_layouts=Shard(1)),
        "body.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "body.drop": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)


@pytest.mark.parametrize(
    ("mesh", "parallelize", "step", "advised"),
    [
        ("cp2", over_positions, of_own_positions, "drops"),
        ("cp2", seeded_apart, of_own_positions, ""),
        ("tp2", tensor_parallel, None, ""),
        ("tp2", sequence_parallel, None, "drops"),
    ],
)
def test_advice(mesh, parallelize, step, advised):
    verdict = verify(Block, parallelize, positions, step, mesh)
    assert verdict.same, f"{verdict}\n{verdict.details}"
    assert bool(verdict.advice) == bool(advised), verdict
    if advised:
        assert "body.drop drops the same places on ranks 0 and 1, which have different parts" in verdict.advice[0]
