"""Tensor parallelism, first by hand and then as a plan. Each way is compared with the full computation.

    launch python3 -m mmm.examples.tensor_parallel
    launch -n 2 --device cpu python3 -m mmm.examples.tensor_parallel --break norms

All ranks have the same samples, and a matrix is sharded over the N ranks. Rank i has one shard of it::

      rows      W = ┌ W₀ ┐   Y = X W = Σᵢ Xᵢ Wᵢ       forward    all-reduce: each rank has computed a summand of Y
                    └ W₁ ┘   Xᵢ: its columns of X     backward   nothing: ∂Wᵢ = Xᵢᵀ ∂Y and ∂Xᵢ = ∂Y Wᵢᵀ
      columns   A = [ A₀│A₁ ]   Yᵢ = GeLU(X Aᵢ)       forward    all-gather of Y's columns
                                                      backward   all-reduce: each rank has computed a summand of ∂X

Columns and then rows, as in a feed-forward layer, need no all-gather between them: Yᵢ is exactly the input that the
rows want. As a plan for PyTorch's ``parallelize_module``::

      plan       x ─▶ up: columns ─▶ GeLU ─▶ down: rows ─▶ all-reduce ─▶ y               x, y: full on every rank
      sequence   xᵢ ─▶ norm ─▶ all-gather ─▶ up ─▶ GeLU ─▶ down ─▶ reduce-scatter ─▶ yᵢ     xᵢ, yᵢ: its own tokens

Both send the same number of bytes, but in the second one norms are not computed N times, and their activations are not
kept N times. The gradient of a norm is then a sum over the ranks. In ``loss`` the logits stay sharded: for each token
the ranks exchange the largest logit, the sum of exponentials and the target's logit, three numbers instead of VOCAB.

Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
Transformer models", 2022 (sequence); docs.pytorch.org/docs/stable/distributed.tensor.parallel.html (loss).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from mmm.comparison import worst
from mmm.errors import LayoutError
from mmm.examples import _support as example
from mmm.examples._support.by_hand import (
    DIM,
    HIDDEN,
    SEQ,
    VOCAB,
    Case,
    differences,
    forward_backward,
    report,
)
from mmm.layout import Layout
from mmm.run import options
from mmm.runtime.ranks import whoami

# [output, gradients …] of the sharded computation, and of the full one.
Ways = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions):
    """Tensor parallelism by hand and as a plan; nothing is trained."""

    BREAKS: ClassVar = {
        "all_reduce": "The function rows_by_hand, whose matrix is sharded by rows, leaves out its all-reduce: each "
        "rank uses its own partial sum as if it were the sum.",
        "norms": "The function sequence_sharded, whose norm sees only the rank's own tokens, leaves the norm out of "
        "its plan: each rank has the gradient of these tokens only, and nothing adds the gradients up.",
    }
    LEFT_OUT: ClassVar = ("batch_size", "global_batch_size", "log_every", "plots", "tracker")
    CHOICES: ClassVar = {"dtype": ("fp64", "fp32")}
    run: options.RunFlags = options.RunFlags(dtype="fp64")


def rows_by_hand(case: Case, mistake: str | None) -> Ways:
    """Y = X W with W sharded by rows: every rank computes a summand of Y."""
    # (batch, seq, dim/N) and (dim/N, dim)
    xi = case.shard(case.x, -1)
    wi = case.shard(case.w, 0)
    # Backward needs nothing from the other ranks: the gradient of a summand is the gradient of the sum.
    y, dxi, dwi = forward_backward(torch.matmul, case.dy, xi, wi)
    if mistake != "all_reduce":
        # (batch, seq, dim): first this rank's summand, then the sum over all ranks.
        dist.all_reduce(y, group=case.group)
    sharded = [y, case.gather(dxi, -1), case.gather(dwi, 0)]
    full = forward_backward(torch.matmul, case.dy, case.x, case.w)
    return sharded, full


def gelu_of_product(x: Tensor, a: Tensor) -> Tensor:
    return F.gelu(x @ a)


def columns_by_hand(case: Case, mistake: str | None) -> Ways:
    """Y = GeLU(X A) with A sharded by columns: every rank computes some columns of Y."""
    # (dim, dim/N) and (batch, seq, dim/N)
    ai = case.shard(case.w, 1)
    dyi = case.shard(case.dy, -1)
    yi, dx, dai = forward_backward(gelu_of_product, dyi, case.x, ai)
    # Every rank has used all of X, so every rank has a summand of its gradient, (batch, seq, dim).
    dist.all_reduce(dx, group=case.group)
    sharded = [case.gather(yi, -1), dx, case.gather(dai, 1)]
    full = forward_backward(gelu_of_product, case.dy, case.x, case.w)
    return sharded, full


def feed_forward(case: Case) -> nn.Module:
    """A feed-forward layer, (BATCH, SEQ, DIM) in and out. Every call gives the same weights."""
    torch.manual_seed(0)
    up = nn.Linear(DIM, HIDDEN)
    down = nn.Linear(HIDDEN, DIM)
    layers = OrderedDict(norm=nn.LayerNorm(DIM), up=up, gelu=nn.GELU(), down=down)
    return nn.Sequential(layers).to(**case.made)


def columns_then_rows(case: Case, mistake: str | None) -> Ways:
    """A feed-forward layer as a plan. Its only communication is an all-reduce after the rows, and one in backward."""
    layer = feed_forward(case)
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    tp.parallelize_module(layer, case.mesh, plan)
    sharded = forward_backward(layer, case.dy, case.x)
    full = forward_backward(feed_forward(case), case.dy, case.x)
    return sharded, full


def sequence_sharded(case: Case, mistake: str | None) -> Ways:
    """The same layer, where each rank holds only its own tokens outside of the products."""
    layer = feed_forward(case)
    plan: dict[str, tp.ParallelStyle] = {
        # Its input is sharded over the sequence, so it all-gathers.
        "up": tp.ColwiseParallel(input_layouts=Shard(1)),
        # Its output shall be sharded over the sequence, so it reduce-scatters instead of all-reducing.
        "down": tp.RowwiseParallel(output_layouts=Shard(1)),
    }
    if mistake != "norms":
        # Sums the norm's gradients over the ranks, each of which has seen only its own tokens.
        plan["norm"] = tp.SequenceParallel()
    tp.parallelize_module(layer, case.mesh, plan)
    # (batch, seq/N, dim) each
    xi = case.shard(case.x, 1)
    dyi = case.shard(case.dy, 1)
    yi, dxi, *weight_gradients = forward_backward(layer, dyi, xi)
    sharded = [case.gather(yi, 1), case.gather(dxi, 1), *weight_gradients]
    full = forward_backward(feed_forward(case), case.dy, case.x)
    return sharded, full


def loss_sharded(case: Case, mistake: str | None) -> Ways:
    """The loss of logits that are sharded over the vocabulary, and never gathered."""

    def loss_and_gradients(layer: nn.Module) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            # (batch · seq, vocab), of which each rank has about vocab/N columns
            logits = layer(x).flatten(0, 1)
            return F.cross_entropy(logits, case.targets)

        return forward_backward(loss, None, case.x, weights=layer.parameters())

    head = nn.Linear(DIM, VOCAB, bias=False).to(**case.made)
    full = nn.Linear(DIM, VOCAB, bias=False).to(**case.made)
    head.load_state_dict(full.state_dict())
    # use_local_output=False: the logits stay a DTensor, from which loss_parallel knows how they are sharded.
    tp.parallelize_module(head, case.mesh, tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    with tp.loss_parallel():
        return loss_and_gradients(head), loss_and_gradients(full)


def compare(case: Case, mistake: str | None = None) -> dict[str, tuple[float, float]]:
    """Compare each way with the full computation, on all ranks. A collective.

    Returns:
        For each way, how far its output and its gradients are off: the largest difference of an element, divided by the
        largest element, on the worst rank.
    """
    by_way = {}
    for way in (rows_by_hand, columns_by_hand, columns_then_rows, sequence_sharded, loss_sharded):
        sharded, full = way(case, mistake)
        output, *gradients = differences(sharded, full, case.x.device).tolist()
        by_way[way.__name__] = (output, worst(gradients))
    return by_way


def train(config: Config) -> bool:
    """Try every way. Returns whether all are right."""
    ranks = whoami().world_size
    if SEQ % ranks:
        fitting = " or ".join(str(n) for n in range(1, SEQ + 1) if SEQ % n == 0)
        raise LayoutError(f"{ranks} ranks do not divide the sequence of {SEQ} and the widths: start {fitting}")
    with example.start_run("tensor_parallel", config, Layout(tp=ranks).fit(ranks)) as run:
        mesh = init_device_mesh(run.device.type, (ranks,), mesh_dim_names=("tp",))
        case = Case(mesh, run.device, run.precision.storage, config.run.seed)
        return report(run, compare(case, config.break_))


if __name__ == "__main__":
    example.main(train, Config, __doc__)
