"""What an example computes by hand, beside the same on one device: inputs, gradients, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmm.comparison import relative_error, worst
from mmm.examples._support.mistakes import TOLERANCE, mistake_of
from mmm.run.run import Run
from mmm.runtime.process_group import gather_floats

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}  # differences
BATCH, SEQ, DIM, HIDDEN, VOCAB = 2, 24, 48, 192, 131  # of a `Case`: its ranks divide SEQ, DIM and HIDDEN


class Case:
    """Tensors to compute with, the same on every rank, and their shards over the ranks of `mesh`, which has one axis.

    Attributes:
        x, dy: a layer's input and its output's gradient, (BATCH, SEQ, DIM). w: (DIM, DIM). targets: (BATCH · SEQ,).
        made: keyword arguments that make a tensor such as these.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.mesh, self.group = mesh, mesh.get_group()
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.x, self.dy = torch.randn(2, BATCH, SEQ, DIM).to(device, dtype)
        self.w = torch.randn(DIM, DIM).to(device, dtype)
        self.targets = torch.randint(VOCAB, (BATCH * SEQ,)).to(device)

    def shard(self, full: Tensor, dim: int) -> Tensor:
        """This rank's shard of a tensor."""
        return full.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()].contiguous()

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """The tensor that the ranks have shards of. A collective."""
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(self.mesh.size())]
        dist.all_gather(shards, shard.contiguous(), group=self.group)
        return torch.cat(shards, dim)


def same_on_all_ranks(run: Run, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of random numbers, on the run's device."""
    torch.manual_seed(0)
    return [torch.randn(shape).to(run.device, run.precision.storage) for shape in shapes]


def forward_backward(f: Callable[..., Tensor], dy: Tensor | None, *inputs: Tensor, weights: Any = None) -> list[Tensor]:
    """f(*inputs), then the gradients of inputs and weights, which are by default the parameters of `f`."""
    if weights is None:
        weights = f.parameters() if isinstance(f, nn.Module) else ()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, (*leaves, *weights), dy)]


def dense_experts(x: Tensor, router: Tensor, experts: list[Tensor], top_k: int) -> Tensor:
    """A layer of experts on one device: all compute all tokens, with weight 0 where they were not chosen.

    Args:
        x: (tokens, dim). router: (n_experts, dim). experts: w1, w2, w3, (n_experts, …) each.
    """
    weight, chosen = (x @ router.T).sigmoid().topk(top_k)
    weight = x.new_zeros(len(x), len(router)).scatter(1, chosen, weight / weight.sum(1, keepdim=True))
    w1, w2, w3 = experts
    outputs = (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT  # (n_experts, tokens, dim)
    return torch.einsum("te,etd->td", weight, outputs)


def differences(results: Iterable[Tensor], expected: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of each tensor, the largest difference over the largest element, on the worst rank: (tensors,). A collective."""
    own = []
    for result, reference in zip(results, expected, strict=True):
        full = result.full_tensor() if isinstance(result, DTensor) else result
        own.append(float(((full - reference).abs().max() / reference.abs().max()).detach()))
    return torch.tensor(gather_floats(own, device), dtype=torch.float64).amax(0)  # NaN where any rank has it


def compare(run: Run, results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Log and record how far what an example has computed by hand is from what was expected. A collective.

    Raises:
        RuntimeError: by more than rounding.
    """
    if run.comm.dry:
        return  # there is nothing to compare
    difference = float(differences(results, expected, run.device).max())
    run.log.info("by hand, output and gradients differ from one device's by %.1e", difference, stacklevel=2)
    run.describe(by_hand_difference=difference)
    check_difference(run, difference, "what is computed by hand differs from one device's")


def check_difference(run: Run, difference: float, who: str) -> None:
    """Refuse a difference that is more than rounding.

    Args:
        who: who differs, as the message begins.

    Raises:
        RuntimeError: the difference is larger, or NaN.
    """
    limit = ALLOWED[run.precision.storage]
    if not run.comm.dry and not difference <= limit:
        raise RuntimeError(f"{who} by {difference:.1e}, more than {limit:.0e}")


def most_of_ranks(local: dict[str, int], device: torch.device) -> dict[str, int]:
    """The largest of all ranks, of each number. A collective."""
    by_rank = torch.tensor(gather_floats([*map(float, local.values())], device), dtype=torch.float64)
    return dict(zip(local, by_rank.amax(0).long().tolist(), strict=True))


def same_losses(run: Run, *models: Sequence[Sequence[float]]) -> bool:
    """Log and record how far losses are apart. Whether all are those of the first way.

    Args:
        models: of each model that was trained, its losses by each way.
    """
    errors: list[float] = []
    for ways in models:
        for losses in ways:
            errors += starmap(relative_error, zip(losses, ways[0], strict=True))
    difference = worst(errors)
    limit = TOLERANCE[run.precision.name]
    run.log.info("the losses differ by %.1e at most (allowed: %.0e)", difference, limit, stacklevel=3)
    run.describe(losses_differ=difference)
    return difference <= limit


@torch.no_grad()
def replica_spread(elements: Tensor, group: dist.ProcessGroup | None) -> float:
    """The largest difference of an element between replicas, on the worst rank. NaN or inf where any has a NaN.

    A collective of all ranks.

    Args:
        elements: of this rank's replica, (n,).
        group: the ranks that have replicas of it. None: all.
    """
    extremes = torch.stack((elements, -elements))  # the largest, and the least with its sign changed
    extremes.masked_fill_(extremes.isnan(), math.inf)  # a reduction by MAX may drop a NaN
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    spread = float(extremes.sum(0).max()) if len(elements) else 0.0
    return worst(row[0] for row in gather_floats([spread], elements.device))


def compare_attention(run: Run, attention_fn: Callable[..., Tensor], own_positions: Tensor) -> None:
    """Compare `attention_fn` of this rank's tokens with causal attention to the full sequence. A collective.

    Args:
        own_positions: which of 8 tokens a rank are this rank's, (8,).
    """
    (full,) = same_on_all_ranks(run, (4, 2, 4, 8 * run.rank.world_size, 16))  # q, k, v, dy: (batch, heads, seq, dim)
    *qkv, dy = full
    *own_qkv, own_dy = full[..., own_positions, :]
    results = forward_backward(attention_fn, own_dy, *own_qkv)
    expected = forward_backward(partial(F.scaled_dot_product_attention, is_causal=True), dy, *qkv)
    compare(run, results, [tensor[..., own_positions, :] for tensor in expected])


def report(run: Run, differences: dict[str, tuple[float, float]]) -> bool:
    """Log and record a table. Whether all is right.

    Args:
        differences: by what was computed, those of its output and of its gradients.
    """
    limit = ALLOWED[run.precision.storage]
    lines = [f"{'':20}{'output':>10}{'gradients':>12}   (allowed: {limit:.0e})"]
    row = {}
    for name, (output, gradient) in differences.items():
        line = f"{name:20}{output:10.1e}{gradient:12.1e}"
        if not (output <= limit and gradient <= limit):  # NaN is wrong as well
            line += "   WRONG"
        lines.append(line)
        row[f"{name}_output"] = output
        row[f"{name}_gradient"] = gradient
    mistake = mistake_of(run)
    if mistake is not None:
        lines.append(f"--break {mistake}, on purpose: {run.config.BREAKS[mistake]}")
    text = "\n".join(lines)
    run.log.info(
        "sharded over %d ranks, differs from the full computation by\n%s", run.rank.world_size, text, stacklevel=2
    )
    run.add_row({**row, "allowed": limit})
    return all(value <= limit for value in row.values())
