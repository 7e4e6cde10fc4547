"""The plans of ``mmm.examples.tensor_parallel``: what to cut is said, and DTensor finds out who has to talk.

Columns, then rows (`ColwiseParallel`, `RowwiseParallel`): one all-reduce forward and one backward for two matrices::

    x ──▶ up: columns ──▶ GeLU ──▶ down: rows ──▶ all-reduce ──▶ y            x, y: whole on every rank

With the sequence cut (sequence parallel), each rank has its own tokens outside the matrices::

    xᵢ ─▶ norm ─▶ all-gather ─▶ up: columns ─▶ GeLU ─▶ down: rows ─▶ reduce-scatter ─▶ yᵢ

As many bytes, since an all-reduce is a reduce-scatter and an all-gather; but norms (and dropout, residuals) are not
worked out, and their activations not kept, N times.

With the loss cut (loss parallel) the logits, the largest activation of a language model, are never whole. Of each token
the ranks exchange the largest logit, the sum of exponentials and the target's logit: three numbers instead of VOCAB.

Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
Transformer models", 2022 (sequence); docs.pytorch.org/docs/stable/distributed.tensor.parallel.html (loss).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

BATCH, SEQ, DIM, HIDDEN, VOCAB = 2, 24, 48, 192, 131  # N divides SEQ, DIM and HIDDEN; it need not divide VOCAB
Ways = tuple[list[Tensor], list[Tensor]]  # [output, gradients …] of the cut computation, and of the whole one


class Case:
    """What is computed, the same on every rank, and how to cut it over a one-dimensional mesh.

    Attributes:
        x, dy: input, and the gradient that comes back: (BATCH, SEQ, DIM). w: (DIM, DIM). targets: (BATCH · SEQ,).
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.mesh, self.group = mesh, mesh.get_group()
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.x, self.dy = torch.randn(2, BATCH, SEQ, DIM).to(**self.made)
        self.w = torch.randn(DIM, DIM).to(**self.made)
        self.targets = torch.randint(VOCAB, (BATCH * SEQ,)).to(device)

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that is cut along `dim`."""
        return whole.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()].contiguous()

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All ranks' parts, put together along `dim`."""
        parts = [torch.empty(part.shape, **self.made) for _ in range(self.mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)


def forward_backward(
    f: Callable[..., Tensor], dy: Tensor | None, *inputs: Tensor, weights: Iterable[Tensor] = ()
) -> list[Tensor]:
    """f(*inputs), then the gradients of inputs and weights."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, (*leaves, *weights), dy)]


def columns_then_rows(case: Case) -> Ways:
    layer, whole = feed_forward(case), feed_forward(case)
    parallelize_module(layer, case.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    cut = forward_backward(layer, case.dy, case.x, weights=layer.parameters())
    return cut, forward_backward(whole, case.dy, case.x, weights=whole.parameters())


def sequence_cut(case: Case) -> Ways:
    layer, whole = feed_forward(case), feed_forward(case)
    up = ColwiseParallel(input_layouts=Shard(1))  # all-gather over the sequence
    down = RowwiseParallel(output_layouts=Shard(1))  # reduce-scatter over it
    parallelize_module(layer, case.mesh, {"norm": SequenceParallel(), "up": up, "down": down})
    xi, dyi = case.mine(case.x, 1), case.mine(case.dy, 1)  # (BATCH, SEQ/N, DIM)
    yi, dxi, *rest = forward_backward(layer, dyi, xi, weights=layer.parameters())
    cut = [case.gather(yi, 1), case.gather(dxi, 1), *rest]
    return cut, forward_backward(whole, case.dy, case.x, weights=whole.parameters())


def feed_forward(case: Case) -> nn.Module:
    """(BATCH, SEQ, DIM) → the same, by way of HIDDEN; every call gives the same weights."""
    torch.manual_seed(0)
    up, down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
    layers: OrderedDict[str, nn.Module] = OrderedDict(norm=nn.LayerNorm(DIM), up=up, gelu=nn.GELU(), down=down)
    return nn.Sequential(layers).to(**case.made)


def loss_cut(case: Case) -> Ways:
    def loss_of(layer: nn.Module) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return F.cross_entropy(layer(x).flatten(0, 1), case.targets)  # logits: (BATCH · SEQ, VOCAB), or about 1/N

        return forward_backward(loss, None, case.x, weights=layer.parameters())

    head, whole = (nn.Linear(DIM, VOCAB, bias=False).to(**case.made) for _ in range(2))
    head.load_state_dict(whole.state_dict())
    parallelize_module(head, case.mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    with loss_parallel():
        cut = loss_of(head)
    return cut, loss_of(whole)
