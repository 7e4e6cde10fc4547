"""Tensor parallelism, first by hand and then as a plan: each way against the full computation.

    launch python3 -m mmm.examples.tensor_parallel
    launch -n 2 --device cpu python3 -m mmm.examples.tensor_parallel --break norms

All ranks have the same samples; a matrix is sharded over N of them. Rank i has one part::

      rows      W = ┌ W₀ ┐   Y = X W = Σᵢ Xᵢ Wᵢ       forward    all-reduce: each rank has computed a summand of Y
                    └ W₁ ┘   Xᵢ: its columns of X     backward   nothing: ∂Wᵢ = Xᵢᵀ ∂Y and ∂Xᵢ = ∂Y Wᵢᵀ
      columns   A = [ A₀│A₁ ]   Yᵢ = GeLU(X Aᵢ)       forward    all-gather of Y's columns
                                                      backward   all-reduce: each rank has computed a summand of ∂X

Columns and then rows, as in a feed-forward layer, need no all-gather: Yᵢ is just what the rows want. As a plan::

      plan       x ─▶ up: columns ─▶ GeLU ─▶ down: rows ─▶ all-reduce ─▶ y               x, y: full on every rank
      sequence   xᵢ ─▶ norm ─▶ all-gather ─▶ up ─▶ GeLU ─▶ down ─▶ reduce-scatter ─▶ yᵢ     xᵢ, yᵢ: its own tokens

As many bytes, but norms are not computed, and their activations not kept, N times. A norm's gradient is then a sum over
the ranks. In ``loss`` the logits stay sharded: of each token the ranks exchange the largest logit, the sum of
exponentials and the target's logit, three numbers instead of VOCAB.

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
from mmm.examples._support.by_hand import DIM, HIDDEN, SEQ, VOCAB, Case, differences, forward_backward, report
from mmm.layout import Layout
from mmm.run import options
from mmm.runtime.ranks import whoami

Ways = tuple[list[Tensor], list[Tensor]]  # [output, gradients …] of the sharded computation, and of the full one


@dataclass(frozen=True, kw_only=True)
class Config(example.BreakOptions):
    """Tensor parallelism by hand and as a plan; nothing is trained."""

    BREAKS: ClassVar = {
        "all_reduce": "rows_by_hand leaves out its all-reduce: each rank takes its own summand for the sum.",
        "norms": "sequence_sharded leaves the norm out of its plan: each rank has the gradient of its own tokens only, "
        "and nothing adds them up.",
    }
    LEFT_OUT: ClassVar = ("batch_size", "global_batch_size", "log_every", "plots")
    CHOICES: ClassVar = {"dtype": ("fp64", "fp32")}
    run: options.Run = options.Run(dtype="fp64")


def rows_by_hand(case: Case, mistake: str | None) -> Ways:
    xi, wi = case.shard(case.x, -1), case.shard(case.w, 0)  # (batch, seq, dim/N), (dim/N, dim)
    y, dxi, dwi = forward_backward(torch.matmul, case.dy, xi, wi)  # backward: a summand has the gradient of the sum
    if mistake != "all_reduce":
        dist.all_reduce(y, group=case.group)  # (batch, seq, dim): this rank's summand, then the sum
    return [y, case.gather(dxi, -1), case.gather(dwi, 0)], forward_backward(torch.matmul, case.dy, case.x, case.w)


def columns_by_hand(case: Case, mistake: str | None) -> Ways:
    layer = lambda x, a: F.gelu(x @ a)  # noqa: E731
    ai, dyi = case.shard(case.w, 1), case.shard(case.dy, -1)  # (dim, dim/N), (batch, seq, dim/N)
    yi, dx, dai = forward_backward(layer, dyi, case.x, ai)
    dist.all_reduce(dx, group=case.group)  # (batch, seq, dim): this rank's summand, then the sum
    return [case.gather(yi, -1), dx, case.gather(dai, 1)], forward_backward(layer, case.dy, case.x, case.w)


def feed_forward(case: Case) -> nn.Module:
    """(BATCH, SEQ, DIM) → the same, by way of HIDDEN; every call gives the same weights."""
    torch.manual_seed(0)
    up, down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(DIM), up=up, gelu=nn.GELU(), down=down)).to(**case.made)


def columns_then_rows(case: Case, mistake: str | None) -> Ways:
    layer = feed_forward(case)
    tp.parallelize_module(layer, case.mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})
    return forward_backward(layer, case.dy, case.x), forward_backward(feed_forward(case), case.dy, case.x)


def sequence_sharded(case: Case, mistake: str | None) -> Ways:
    layer = feed_forward(case)
    plan: dict[str, tp.ParallelStyle] = {
        "up": tp.ColwiseParallel(input_layouts=Shard(1)),  # all-gather over the sequence
        "down": tp.RowwiseParallel(output_layouts=Shard(1)),  # reduce-scatter over it
    }
    if mistake != "norms":
        plan["norm"] = tp.SequenceParallel()
    tp.parallelize_module(layer, case.mesh, plan)
    yi, dxi, *rest = forward_backward(layer, case.shard(case.dy, 1), case.shard(case.x, 1))  # (BATCH, SEQ/N, DIM)
    full = forward_backward(feed_forward(case), case.dy, case.x)
    return [case.gather(yi, 1), case.gather(dxi, 1), *rest], full


def loss_sharded(case: Case, mistake: str | None) -> Ways:
    def both(layer: nn.Module) -> list[Tensor]:
        loss = lambda x: F.cross_entropy(layer(x).flatten(0, 1), case.targets)  # noqa: E731
        return forward_backward(loss, None, case.x, weights=layer.parameters())

    head, full = (nn.Linear(DIM, VOCAB, bias=False).to(**case.made) for _ in range(2))  # head: about 1/N of VOCAB
    head.load_state_dict(full.state_dict())
    tp.parallelize_module(head, case.mesh, tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    with tp.loss_parallel():
        return both(head), both(full)


def compare(case: Case, mistake: str | None = None) -> dict[str, tuple[float, float]]:
    """How far output and gradients of each way are, over the largest element, on the worst rank. A collective."""
    by_way = {}
    for way in (rows_by_hand, columns_by_hand, columns_then_rows, sequence_sharded, loss_sharded):
        output, *gradients = differences(*way(case, mistake), case.x.device).tolist()
        by_way[way.__name__] = (output, worst(gradients))
    return by_way


def train(config: Config) -> bool:
    """Try every way. Whether all are right."""
    ranks = whoami().world_size
    if SEQ % ranks:
        fitting = " or ".join(str(n) for n in range(1, SEQ + 1) if SEQ % n == 0)
        raise LayoutError(f"{ranks} ranks do not divide the sequence of {SEQ} and the widths: start {fitting}")
    with example.start_run("tensor_parallel", config, Layout(tp=ranks).fit(ranks)) as run:
        mesh = init_device_mesh(run.device.type, (ranks,), mesh_dim_names=("tp",))
        return report(run, compare(Case(mesh, run.device, run.precision.storage, config.run.seed), config.break_))


if __name__ == "__main__":
    example.main(train, Config, __doc__)
