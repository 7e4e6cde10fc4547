"""What several examples need to compute something by hand and compare it with the same on one device."""

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

# Relative differences that rounding may cause, by the dtype of the parameters.
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}
# Sizes of a `Case`. Its ranks divide SEQ, DIM and HIDDEN, and need not divide VOCAB.
BATCH = 2
SEQ = 24
DIM = 48
HIDDEN = 192
VOCAB = 131


class Case:
    """Tensors to compute with, the same on every rank, and their shards over the ranks of a mesh with one axis.

    Attributes:
        x: input of a layer, (BATCH, SEQ, DIM).
        dy: gradient of the layer's output, (BATCH, SEQ, DIM).
        w: a matrix, (DIM, DIM).
        targets: a class for each token, (BATCH · SEQ,) int64.
        made: keyword arguments that give a tensor the device and dtype of these.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.mesh = mesh
        self.group = mesh.get_group()
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        # Drawn on the CPU in float32, so that they are the same on every device and in every dtype.
        self.x, self.dy = torch.randn(2, BATCH, SEQ, DIM).to(device, dtype)
        self.w = torch.randn(DIM, DIM).to(device, dtype)
        self.targets = torch.randint(VOCAB, (BATCH * SEQ,)).to(device)

    def shard(self, full: Tensor, dim: int) -> Tensor:
        """This rank's shard of a tensor."""
        shards = full.chunk(self.mesh.size(), dim)
        return shards[self.mesh.get_local_rank()].contiguous()

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """The full tensor, put together from the shards of all ranks. A collective of the mesh."""
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(self.mesh.size())]
        dist.all_gather(shards, shard.contiguous(), group=self.group)
        return torch.cat(shards, dim)


def same_on_all_ranks(run: Run, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of random numbers, the same on every rank, on the run's device."""
    torch.manual_seed(0)
    return [torch.randn(shape).to(run.device, run.precision.storage) for shape in shapes]


def forward_backward(f: Callable[..., Tensor], dy: Tensor | None, *inputs: Tensor, weights: Any = None) -> list[Tensor]:
    """Compute f(*inputs), then the gradients of the inputs and of the weights.

    Args:
        dy: gradient of the output. None for a scalar.
        weights: parameters of `f`. Default: all that it has.

    Returns:
        The output, a gradient for each input, and a gradient for each weight.
    """
    if weights is None:
        weights = f.parameters() if isinstance(f, nn.Module) else ()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*leaves)
    gradients = torch.autograd.grad(y, (*leaves, *weights), dy)
    return [y.detach(), *gradients]


def dense_experts(x: Tensor, router: Tensor, experts: list[Tensor], top_k: int) -> Tensor:
    """Compute a layer of experts on one device: all compute all tokens, with weight 0 where they were not chosen.

    Args:
        x: (tokens, dim).
        router: (n_experts, dim).
        experts: w1, w2, w3 of all experts, (n_experts, …) each.
    """
    # (tokens, top_k) each
    chosen_weight, chosen = (x @ router.T).sigmoid().topk(top_k)
    chosen_weight = chosen_weight / chosen_weight.sum(1, keepdim=True)
    # (tokens, n_experts)
    weight = x.new_zeros(len(x), len(router)).scatter(1, chosen, chosen_weight)
    w1, w2, w3 = experts
    # SwiGLU of every expert: (n_experts, tokens, hidden), then (n_experts, tokens, dim)
    hidden = F.silu(x @ w1.mT) * (x @ w3.mT)
    outputs = hidden @ w2.mT
    return torch.einsum("te,etd->td", weight, outputs)


def differences(results: Iterable[Tensor], expected: Iterable[Tensor], device: torch.device) -> Tensor:
    """Compare tensors on every rank. A collective of all ranks.

    Returns:
        For each tensor the largest difference of an element, divided by the largest element, on the worst rank:
        (tensors,). NaN where any rank has a NaN.
    """
    local = []
    for result, reference in zip(results, expected, strict=True):
        full = result.full_tensor() if isinstance(result, DTensor) else result
        difference = (full - reference).abs().max() / reference.abs().max()
        local.append(float(difference.detach()))
    # (ranks, tensors)
    by_rank = torch.tensor(gather_floats(local, device), dtype=torch.float64)
    return by_rank.amax(0)


def compare(run: Run, results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare what an example computed by hand with one device's result, and log and record the difference.

    A collective of all ranks.

    Args:
        results: the output, then the gradients.
        expected: the same from one device.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    # A dry run computes nothing that could be compared.
    if run.comm.dry:
        return
    difference = float(differences(results, expected, run.device).max())
    run.log.info("by hand, output and gradients differ from one device's by %.1e", difference, stacklevel=2)
    run.describe(by_hand_difference=difference)
    check_difference(run, difference, "what is computed by hand differs from one device's")


def check_difference(run: Run, difference: float, claim: str) -> None:
    """Refuse a difference that is more than rounding.

    Args:
        claim: what differs from what, as the message begins.

    Raises:
        RuntimeError: the difference is larger, or NaN.
    """
    limit = ALLOWED[run.precision.storage]
    if not run.comm.dry and not difference <= limit:
        raise RuntimeError(f"{claim} by {difference:.1e}, more than {limit:.0e}")


def most_of_ranks(local: dict[str, int], device: torch.device) -> dict[str, int]:
    """For each number, the largest of all ranks. A collective of all ranks."""
    values = [float(value) for value in local.values()]
    # (ranks, numbers). float64 holds every integer up to 2⁵³.
    by_rank = torch.tensor(gather_floats(values, device), dtype=torch.float64)
    largest = by_rank.amax(0).long().tolist()
    return dict(zip(local, largest, strict=True))


def same_losses(run: Run, *models: Sequence[Sequence[float]]) -> bool:
    """Log and record how far the losses of several ways of training differ.

    Args:
        models: for each model that was trained, the losses of each way.

    Returns:
        Whether the losses of every way are those of the first.
    """
    errors: list[float] = []
    for ways in models:
        reference = ways[0]
        for losses in ways:
            errors += starmap(relative_error, zip(losses, reference, strict=True))
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
        elements: the elements of this rank's replica, (n,).
        group: the ranks that have replicas of it. None for all ranks.
    """
    # (2, n). One all-reduce finds the largest and the smallest of each element, because min(x) = -max(-x).
    extremes = torch.stack((elements, -elements))
    # A reduction by MAX may drop a NaN, but not inf.
    extremes.masked_fill_(extremes.isnan(), math.inf)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    spread = 0.0
    # A rank may hold no elements at all.
    if len(elements):
        spread = float(extremes.sum(0).max())
    by_rank = gather_floats([spread], elements.device)
    return worst(row[0] for row in by_rank)


def compare_attention(run: Run, attention_fn: Callable[..., Tensor], own_positions: Tensor) -> None:
    """Compare `attention_fn` of this rank's tokens with causal attention to the full sequence. A collective.

    Args:
        own_positions: the 8 tokens of the full sequence that are this rank's, (8,).
    """
    seq = 8 * run.rank.world_size
    # q, k, v and dy in one tensor: (4, batch, heads, seq, head_dim)
    (full,) = same_on_all_ranks(run, (4, 2, 4, seq, 16))
    *qkv, dy = full
    *own_qkv, own_dy = full[..., own_positions, :]
    results = forward_backward(attention_fn, own_dy, *own_qkv)
    causal_attention = partial(F.scaled_dot_product_attention, is_causal=True)
    expected = forward_backward(causal_attention, dy, *qkv)
    compare(run, results, [tensor[..., own_positions, :] for tensor in expected])


def report(run: Run, differences: dict[str, tuple[float, float]]) -> bool:
    """Log and record a table of differences.

    Args:
        differences: by the name of what was computed, the difference of its output and the largest of its gradients.

    Returns:
        Whether all are within rounding.
    """
    limit = ALLOWED[run.precision.storage]
    lines = [f"                        output   gradients   (allowed: {limit:.0e})"]
    row = {}
    for name, (output, gradient) in differences.items():
        line = f"{name:20}{output:10.1e}{gradient:12.1e}"
        # Written so that NaN is wrong as well.
        if not (output <= limit and gradient <= limit):
            line += "   WRONG"
        lines.append(line)
        row[f"{name}_output"] = output
        row[f"{name}_gradient"] = gradient
    mistake = mistake_of(run)
    if mistake is not None:
        lines.append(f"--break {mistake}, on purpose: {run.config.BREAKS[mistake]}")
    text = "\n".join(lines)
    run.log.info(
        "sharded over %d ranks, differs from the full computation by\n%s",
        run.rank.world_size,
        text,
        stacklevel=2,
    )
    run.add_row({**row, "allowed": limit})
    return all(value <= limit for value in row.values())
