"""Float32 inside of a model, with a count of labels that differs between samples; and in the parallel program alone."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mmm_verify import verify
from support.by_hand import averaged, copy, nothing, reduce
from support.clock import long

IGNORED = -100
# The distance from 1 to the next float.
FLOAT32 = torch.finfo(torch.float32).eps


def tokens():
    """The samples have 6, 5, 2 and 1 labels."""
    inputs = torch.randint(11, (4, 6))
    labels = torch.randint(11, (4, 6))
    for sample, count in enumerate((6, 5, 2, 1)):
        labels[sample, count:] = IGNORED
    return inputs, labels


class Norm(nn.Module):
    """As those of language models: float32 inside."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        # (…, size) over the root of its mean square
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Router(nn.Module):
    """Mixes two matrices by a softmax in float32."""

    def __init__(self, size):
        super().__init__()
        self.gate = nn.Linear(size, 2)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(2))

    def forward(self, x):
        # (batch, positions, 2)
        weights = self.gate(x).float().softmax(-1).to(x.dtype)
        return sum(expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts))


class Language(nn.Module):
    def __init__(self, middle=None):
        super().__init__()
        self.word = nn.Embedding(11, 32)
        self.head = nn.Linear(32, 11, bias=False)
        self.middle = middle(32) if middle is not None else nn.Linear(32, 32)
        self.group = None

    def forward(self, x):
        h = self.middle(self.word(x))
        # Each rank of tp has some of the words.
        return self.head(h if self.group is None else copy(h, self.group))


norm = partial(Language, Norm)
router = partial(Language, Router)


def by_count(model, batch, mesh, upcast=True, scale=1.0):
    """The sum over labels, over the count of all ranks' labels."""
    inputs, labels = batch
    logits = model(inputs)
    logits = logits.float() if upcast else logits
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    count = (labels != IGNORED).sum()
    if mesh is None or "dp" not in mesh.mesh_dim_names:
        return total / count
    dist.all_reduce(count)
    # The gradients are averaged over dp later: times its size, the mean is a sum.
    (total / count * mesh.size() * scale).backward()
    shown = (total / count).detach()
    dist.all_reduce(shown)
    return shown


in_float64 = partial(by_count, upcast=False)
a_little_off = partial(by_count, scale=1 + 1e-5)


def by_own_count(model, batch, mesh):
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def rounded_loss(model, batch, mesh):
    """On one device in float64."""
    return by_count(model, batch, mesh, upcast=mesh is not None)


def over_vocabulary(model, batch, mesh):
    """Each rank of tp has some of the words: the sum of exponents is added up in float32."""
    if mesh is None:
        return by_count(model, batch, None)
    inputs, labels = batch
    group = mesh["tp"].get_group()
    logits = model(inputs).float().flatten(0, -2)
    labels = labels.flatten()
    # 11 words: rank 0 has 6 of them, rank 1 has 5.
    first = 6 * dist.get_rank(group)
    normalizer = reduce(logits.exp().sum(-1), group).log()
    # Labels whose word this rank has.
    own = (labels >= first) & (labels < first + logits.shape[-1])
    column = (labels - first).clamp(0, logits.shape[-1] - 1)
    chosen = logits.gather(-1, column[:, None])[:, 0]
    chosen = reduce(torch.where(own, chosen, 0.0), group)
    labelled = labels != IGNORED
    return torch.where(labelled, normalizer - chosen, 0.0).sum() / labelled.sum()


def split_vocabulary(model, mesh):
    model.group = mesh["tp"].get_group()
    model.head.weight = nn.Parameter(model.head.weight.detach().split(6)[mesh.get_rank()].clone())


def another_eps(model, mesh):
    averaged(model, mesh)
    # Ten times the reference's.
    model.middle.eps = 1e-5


def fsdp_in_float32(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def norm_in_float32(model, mesh):
    """In the parallel program alone."""
    averaged(model, mesh)
    model.middle.register_forward_hook(lambda module, args, output: output.float().to(output.dtype))


def reduced_in_float32(model, mesh):
    def take_mean(parameter):
        # float64 is lost here.
        gradient = parameter.grad.float() / mesh.size()
        dist.all_reduce(gradient)
        parameter.grad.copy_(gradient)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take_mean)


def compressed(model, mesh):
    def hook(state, bucket):
        gradient = bucket.buffer().float() / mesh.size()
        future = dist.all_reduce(gradient, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    return ddp


def rounded_and_not_averaged(model, mesh):
    model.middle.register_forward_hook(lambda module, args, output: output.float().to(output.dtype))


@pytest.mark.parametrize(
    ("model", "parallelize", "step", "mesh"),
    [
        (norm, averaged, by_count, "dp2"),
        long(norm, lambda model, mesh: fully_shard(model, mesh=mesh), by_count, "dp2"),
        long(router, averaged, by_count, "dp2"),
        long(Language, averaged, by_count, "dp2"),
        long(norm, averaged, in_float64, "dp2"),
        (norm, split_vocabulary, over_vocabulary, "tp2"),
        long(router, split_vocabulary, over_vocabulary, "tp2"),
        long(norm, nothing, by_own_count, "tp2"),
        long(norm, averaged, by_count, "dp4"),
    ],
)
def test_right(model, parallelize, step, mesh):
    verdict = verify(model, parallelize, tokens, step, mesh)
    assert verdict.same, f"{verdict}\n{verdict.details}"


@pytest.mark.parametrize(
    ("model", "parallelize", "step"),
    [
        (norm, averaged, by_own_count),
        long(norm, nothing, by_count),
        long(router, nothing, by_count),
        (norm, another_eps, by_count),
        long(norm, averaged, a_little_off),
        long(Language, averaged, by_own_count),
        long(Language, nothing, rounded_loss),
        long(Language, rounded_and_not_averaged, in_float64),
    ],
)
def test_wrong(model, parallelize, step):
    verdict = verify(model, parallelize, tokens, step, "dp2")
    assert verdict.result == "not the same", f"{verdict}\n{verdict.details}"


@pytest.mark.parametrize(
    ("parallelize", "step"),
    [
        (averaged, rounded_loss),
        long(fsdp_in_float32, in_float64),
        (norm_in_float32, in_float64),
        long(reduced_in_float32, in_float64),
        long(compressed, in_float64),
    ],
)
def test_float32_in_the_parallel_program_alone(parallelize, step):
    verdict = verify(Language, parallelize, tokens, step, "dp2")
    assert verdict.result == "rounded to float32", f"{verdict}\n{verdict.details}"
    assert verdict.exit_code == 2
    for finding in verdict.findings:
        assert FLOAT32 / 1000 < finding.error < 1000 * FLOAT32


class Scaled(nn.Linear):
    """Has a scale that is made in float32, as in some embeddings, and a large integer."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("scale", torch.tensor(3.0, dtype=torch.float32).sqrt())
        # The next integer is no float32.
        self.register_buffer("seen", torch.tensor(2**24))

    def forward(self, x):
        return super().forward(x) * self.scale


def made_anew(model, mesh):
    averaged(model, mesh)
    model.scale = torch.tensor(3.0, dtype=torch.float64).sqrt()


def made_anew_from_another_number(model, mesh):
    averaged(model, mesh)
    model.scale = torch.tensor(3.0 + 1e-6, dtype=torch.float64).sqrt()


def another_integer(model, mesh):
    averaged(model, mesh)
    model.seen += 1


@pytest.mark.parametrize(
    ("parallelize", "result"),
    [
        (made_anew, "rounded to float32"),
        (made_anew_from_another_number, "not the same"),
        (another_integer, "not the same"),
    ],
)
def test_a_buffer_with_more_digits_than_on_one_device(parallelize, result):
    verdict = verify(Scaled, parallelize, lambda: (torch.randn(8, 3), torch.randn(8, 2)), None, "dp2")
    assert verdict.result == result, f"{verdict}\n{verdict.details}"
    assert verdict.findings[0].name == ("seen" if parallelize is another_integer else "scale")


def test_what_is_not_seen_is_said():
    verdict = verify(norm, averaged, tokens, by_count, "dp2")
    assert any("float32" in note for note in verdict.notes)


class BiasBeforeBatchNorm(nn.Module):
    """The gradient of the first bias is 0 but for rounding, which the small variance makes large."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(1e-4 * x)))


def fields():
    return torch.randn(64, 4), torch.randn(64, 2)


def reordered(program, batch, mesh):
    """On ranks the samples, all of which each rank has, are in another order."""
    x, y = batch
    if mesh is not None:
        # 0, 32, 1, 33, …
        order = torch.arange(64).view(2, 32).T.flatten()
        x = x[order]
        y = y[order]
    return F.mse_loss(program(x), y)


def test_a_gradient_that_is_only_rounding():
    verdict = verify(BiasBeforeBatchNorm, lambda model, mesh: model, fields, reordered, "tp2")
    assert verdict, verdict
    assert "the gradient of first.bias is small beside the largest one" in str(verdict)


def test_a_mistake_in_the_others_is_found_beside_it():
    def half(model, mesh):
        model.first.weight.register_hook(lambda gradient: gradient / 2)
        return model

    verdict = verify(BiasBeforeBatchNorm, half, fields, reordered, "tp2")
    assert verdict.findings[0].name == "first.weight"
