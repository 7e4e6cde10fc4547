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
the ranks. In ``loss`` the logits, the largest activation of a language model, stay sharded: of each token the ranks
exchange the largest logit, the sum of exponentials and the target's logit, three numbers instead of VOCAB.

Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
Transformer models", 2022 (sequence); docs.pytorch.org/docs/stable/distributed.tensor.parallel.html (loss).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from mmm.errors import LayoutError
from mmm.parallel import Layout
from mmm.runtime.process_group import gather_floats
from mmm.runtime.ranks import whoami
from mmm.trainer.flags import run_main
from mmm.trainer.options import BreakOptions, parse
from mmm.trainer.run import start_run

BATCH, SEQ, DIM, HIDDEN, VOCAB = 2, 24, 48, 192, 131  # N divides SEQ, DIM and HIDDEN; it need not divide VOCAB
LIMIT = {"fp64": 1e-12, "fp32": 1e-5}
Ways = tuple[list[Tensor], list[Tensor]]  # [output, gradients …] of the sharded computation, and of the full one


@dataclass(frozen=True, kw_only=True)
class Config(BreakOptions):
    """Tensor parallelism by hand and as a plan; nothing is trained."""

    BREAKS: ClassVar = {
        "all_reduce": "rows_by_hand leaves out its all-reduce: each rank takes its own summand for the sum.",
        "norms": "sequence_cut leaves the norm out of its plan: each rank has the gradient of its own tokens only, and "
        "nothing adds them up.",
    }
    seed: int = 0
    """Decides the numbers that are computed with."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    forget_all_reduce: Annotated[bool, tyro.conf.arg(help="The same as --break all_reduce.")] = False


class Case:
    """What is computed, the same on every rank, and how to shard it. x, dy: (BATCH, SEQ, DIM). w: (DIM, DIM)."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.mesh, self.group = mesh, mesh.get_group()
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.x, self.dy = torch.randn(2, BATCH, SEQ, DIM).to(device, dtype)
        self.w = torch.randn(DIM, DIM).to(device, dtype)
        self.targets = torch.randint(VOCAB, (BATCH * SEQ,)).to(device)

    def mine(self, full: Tensor, dim: int) -> Tensor:
        return full.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()].contiguous()

    def gather(self, part: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)


def forward_backward(f: Callable[..., Tensor], dy: Tensor | None, *inputs: Tensor, weights: Any = ()) -> list[Tensor]:
    """f(*inputs), then the gradients of inputs and weights."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, (*leaves, *weights), dy)]


def rows_by_hand(case: Case, mistake: str | None) -> Ways:
    xi, wi = case.mine(case.x, -1), case.mine(case.w, 0)  # (batch, seq, dim/N), (dim/N, dim)
    y, dxi, dwi = forward_backward(torch.matmul, case.dy, xi, wi)  # backward: a summand has the gradient of the sum
    if mistake != "all_reduce":
        dist.all_reduce(y, group=case.group)  # (batch, seq, dim): this rank's summand, then the sum
    full = forward_backward(torch.matmul, case.dy, case.x, case.w)
    return [y, case.gather(dxi, -1), case.gather(dwi, 0)], full


def columns_by_hand(case: Case, mistake: str | None) -> Ways:
    def layer(x: Tensor, a: Tensor) -> Tensor:
        return F.gelu(x @ a)

    ai, dyi = case.mine(case.w, 1), case.mine(case.dy, -1)  # (dim, dim/N), (batch, seq, dim/N)
    yi, dx, dai = forward_backward(layer, dyi, case.x, ai)
    dist.all_reduce(dx, group=case.group)  # (batch, seq, dim): this rank's summand, then the sum
    return [case.gather(yi, -1), dx, case.gather(dai, 1)], forward_backward(layer, case.dy, case.x, case.w)


def feed_forward(case: Case) -> nn.Module:
    """(BATCH, SEQ, DIM) → the same, by way of HIDDEN; every call gives the same weights."""
    torch.manual_seed(0)
    up, down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(DIM), up=up, gelu=nn.GELU(), down=down)).to(**case.made)


def columns_then_rows(case: Case, mistake: str | None) -> Ways:
    layer, full = feed_forward(case), feed_forward(case)
    parallelize_module(layer, case.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = forward_backward(layer, case.dy, case.x, weights=layer.parameters())
    return found, forward_backward(full, case.dy, case.x, weights=full.parameters())


def sequence_cut(case: Case, mistake: str | None) -> Ways:
    layer, full = feed_forward(case), feed_forward(case)
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(input_layouts=Shard(1))}  # all-gather over the sequence
    plan["down"] = RowwiseParallel(output_layouts=Shard(1))  # reduce-scatter over it
    if mistake != "norms":
        plan["norm"] = SequenceParallel()
    parallelize_module(layer, case.mesh, plan)
    xi, dyi = case.mine(case.x, 1), case.mine(case.dy, 1)  # (BATCH, SEQ/N, DIM)
    yi, dxi, *rest = forward_backward(layer, dyi, xi, weights=layer.parameters())
    full_ones = forward_backward(full, case.dy, case.x, weights=full.parameters())
    return [case.gather(yi, 1), case.gather(dxi, 1), *rest], full_ones


def loss_cut(case: Case, mistake: str | None) -> Ways:
    def both(layer: nn.Module) -> list[Tensor]:
        # logits: (BATCH · SEQ, VOCAB), or about 1/N of VOCAB
        loss = lambda x: F.cross_entropy(layer(x).flatten(0, 1), case.targets)  # noqa: E731
        return forward_backward(loss, None, case.x, weights=layer.parameters())

    head, full = (nn.Linear(DIM, VOCAB, bias=False).to(**case.made) for _ in range(2))
    head.load_state_dict(full.state_dict())
    parallelize_module(head, case.mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    with loss_parallel():
        return both(head), both(full)


def compare(case: Case, mistake: str | None = None) -> dict[str, list[float]]:
    """How far output and gradients of each way are, over the largest element, on the worst rank. A collective."""
    found = {}
    for way in (rows_by_hand, columns_by_hand, columns_then_rows, sequence_cut, loss_cut):
        sharded, full = way(case, mistake)
        plain = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in sharded]
        apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(plain, full, strict=True)]
        everyone = gather_floats([apart[0], max(apart[1:])], case.x.device)
        found[way.__name__] = [max(column) for column in zip(*everyone, strict=True)]
    return found


def train(config: Config) -> bool:
    """Try every way. Whether all are right."""
    config = replace(config, break_="all_reduce") if config.forget_all_reduce else config
    config.check()
    ranks = whoami().world_size
    if SEQ % ranks:
        fitting = " or ".join(str(n) for n in range(1, SEQ + 1) if SEQ % n == 0)
        raise LayoutError(f"{ranks} ranks do not divide the sequence of {SEQ} and the widths: start {fitting}")
    with start_run("tensor_parallel", config, Layout(tp=ranks).fit(ranks)) as run:
        mesh = init_device_mesh(run.device.type, (ranks,), mesh_dim_names=("tp",))
        found = compare(Case(mesh, run.device, run.precision.storage, config.seed), config.break_)
        limit = LIMIT[run.precision.name]
        lines = [f"{'':20}{'output':>10}{'gradients':>12}   (allowed: {limit:.0e})"]
        for name, (output, gradient) in found.items():
            wrong = "" if max(output, gradient) <= limit else "   WRONG"
            lines.append(f"{name:20}{output:10.1e}{gradient:12.1e}{wrong}")
        if config.break_ is not None:
            lines.append(f"--break {config.break_}, on purpose: {config.BREAKS[config.break_]}")
        run.log.info("sharded over %d ranks, differs from the full computation by\n%s", ranks, "\n".join(lines))
        if run.record is not None:
            row = {
                f"{name}_{what}": n
                for name, two in found.items()
                for what, n in zip(("output", "gradient"), two, strict=False)
            }
            run.record.update({**row, "allowed": limit})
    return all(value <= limit for two in found.values() for value in two)  # NaN is wrong as well


def main() -> None:
    if not train(parse(Config, __doc__)):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
