"""A routed feed-forward layer: many feed-forward networks ("experts"), of which each token uses a few.

::

    x ──► router: n_experts scores a token ──► + expert_bias, the top_k highest ──► sort (token, choice) by expert
    │                  │                                                                        │
    │                  ▼                                                                        ▼
    │            weight of a choice                                           experts: each computes its own tokens
    │                  │                                                                        │
    └──────────────► sum over the choices of a token: weight · output ◄───── back in the order of tokens

Dropless: an expert takes all tokens that choose it, without a capacity. Scores are sigmoids in float32 or wider, and
the weights of a token's choices add up to 1. With top_k 1 the weight is the score itself, since a constant 1 would give
the router no gradient.

The load is balanced without a second loss: `expert_bias` changes the choice but not the weights, and
`mmm.parallel.ep.balance.balance_experts` adjusts it after each step from the tokens that are counted here.

This file knows nothing of meshes: expert parallelism replaces ``Experts.expert_forward``, where tokens meet experts.

Sources: Shazeer et al., "Outrageously large neural networks", 2017; Gale et al., "MegaBlocks", 2022 (dropless);
DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2 (sigmoid scores, bias); Wang et al., "Auxiliary-loss-free load balancing
strategy for mixture-of-experts", 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.torch_private.module import is_fake

ExpertForward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def to_host_list(counts: Tensor, total: int) -> list[int]:
    """The elements of `counts` (any shape, sum `total`) on the host, flat.

    A meta or fake tensor has no values: `total` is then spread evenly, as balanced routing would.
    """
    n = counts.numel()
    if counts.is_meta or is_fake(counts):
        return [total * (i + 1) // n - total * i // n for i in range(n)]
    return counts.flatten().tolist()


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch multiplies the rows of each expert by its own matrix in one kernel: in bf16, on CUDA. On other
    devices its function is a loop that reads the offsets on the host.

    Args:
        x: (rows, dim). weight: (experts, hidden, dim). Rows of both have to be multiples of 16 bytes.
    """
    fits = len(x) > 0 and all(size % 8 == 0 for size in weight.shape[1:])
    if x.device.type != "cuda" or {x.dtype, weight.dtype} != {torch.bfloat16} or not fits or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(x.device).major >= 8


def expert_forward(
    x: Tensor, tokens_per_expert: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, on_host: list[int] | None = None
) -> Tensor:
    """Each expert's SwiGLU, ``w2(silu(w1 x) * w3 x)``, of its own rows.

    One product for all experts where the device has it. Else an expert after the other, for which the host has to know
    how many rows each has.

    Args:
        x: (rows, dim), sorted by expert. tokens_per_expert: (experts,) int64, rows of each, which may be 0.
        w1, w3: (experts, hidden, dim). w2: (experts, dim, hidden).
        on_host: `tokens_per_expert`, where the host knows it already.

    Returns:
        (rows, dim).
    """
    if has_grouped_product(x, w1):
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)  # (experts,): where the rows of each end
        gate, up = (F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in (w1, w3))  # each (rows, hidden)
        return F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    rows = x.split(to_host_list(tokens_per_expert, len(x)) if on_host is None else on_host)  # each (rows, dim)
    weights = zip(w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat(
        [F.linear(F.silu(F.linear(r, a)) * F.linear(r, c), b) for r, (a, b, c) in zip(rows, weights, strict=True)]
    )


class Router(nn.Module):
    """(tokens, dim) to scores (tokens, n_experts) in (0, 1).

    Scores are float32 or wider: in half precision, rounding, and so the mesh, would decide the order of close scores.

    Attributes:
        used: the weight as the last forward used it, through which its gradient passes.
    """

    def __init__(self, dim: int, n_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.used: Tensor | None = None
        nn.init.normal_(self.weight, std=0.02)  # after registration: nothing is drawn on the meta device

    def forward(self, x: Tensor) -> Tensor:
        accum_dtype, kind = torch.promote_types(x.dtype, torch.float32), x.device.type
        no_cast = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
        self.used = self.weight.view_as(self.weight)  # (n_experts, dim)
        with no_cast:
            return F.linear(x.to(accum_dtype), self.used.to(accum_dtype)).sigmoid()  # (tokens, n_experts)


class Experts(nn.Module):
    """The experts' matrices, stacked along dim 0.

    Attributes:
        expert_forward: the function of (rows, tokens_per_expert, w1, w2, w3); expert parallelism replaces it.
    """

    def __init__(self, dim: int, hidden: int, n_experts: int) -> None:
        super().__init__()
        self.expert_forward: ExpertForward = expert_forward
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return self.expert_forward(x, tokens_per_expert, self.w1, self.w2, self.w3)


class MixtureOfExperts(nn.Module):
    """(…, dim) in and out: `top_k` of `n_experts` experts for each token.

    Attributes:
        expert_bias: (n_experts,), added to the scores for the choice alone; saved with the model.
        tokens_per_expert: (n_experts,) int64, how often this rank's tokens chose each expert, over all forwards whose
            backward has run since this was set to None; None where there were none.
    """

    expert_bias: Tensor

    def __init__(self, dim: int, hidden: int, n_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = Router(dim, n_experts)
        self.experts = Experts(dim, hidden, n_experts)
        self.register_buffer("expert_bias", torch.zeros(n_experts))
        self.tokens_per_expert: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (tokens, dim)
        scores = self.router(tokens)  # (tokens, n_experts)
        # A stable sort: of equal scores the lower number wins, on every device.
        biased = scores.detach() + self.expert_bias
        chosen = biased.argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]  # (tokens, top_k)
        weight = scores.gather(1, chosen)  # (tokens, top_k)
        if self.top_k > 1:
            weight = weight / weight.sum(1, keepdim=True)
        flat = chosen.flatten()  # (tokens · top_k): expert of each choice
        counts = torch.zeros_like(self.expert_bias, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        self._count_in_backward(counts)
        order = flat.argsort(stable=True)  # the choices, by expert
        rows = self.experts(tokens.index_select(0, order // self.top_k), counts)  # (tokens · top_k, dim)
        back = rows.index_select(0, order.argsort()).view(-1, self.top_k, x.shape[-1])  # (tokens, top_k, dim)
        return (weight.unsqueeze(-1) * back).sum(1).to(x.dtype).view_as(x)  # (…, dim)

    def _count_in_backward(self, counts: Tensor) -> None:
        """Add `counts` when the router's weight gets its gradient of this forward, so once for each token trained on.

        An evaluation, a forward that activation checkpointing repeats and a pipeline's shape inference run no such
        backward, and do not count.
        """

        def add(_: Tensor) -> None:
            self.tokens_per_expert = counts if self.tokens_per_expert is None else self.tokens_per_expert + counts

        weight, self.router.used = self.router.used, None
        if weight is not None and weight.requires_grad:
            weight.register_hook(add)


def has_experts(model: nn.Module) -> bool:
    """Whether a model has a layer of routed experts."""
    return any(isinstance(module, MixtureOfExperts) for module in model.modules())
