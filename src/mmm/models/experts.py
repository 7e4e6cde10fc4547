"""A routed feed-forward layer: many feed-forward networks ("experts"), of which each token goes through a few.

::

    x ──► router: n_experts scores a token ──► + expert_bias, the top_k highest ──► sort (token, choice) by expert
    │                  │                                                                        │
    │                  ▼                                                                        ▼
    │            weight of a choice                                          experts: each works out its own tokens
    │                  │                                                                        │
    └──────────────► sum over the choices of a token: weight · output ◄───── back in the order of tokens

Dropless: an expert takes all tokens that choose it; there is no capacity above which tokens are lost. Scores are
sigmoids of at least float32, and the weights of a token's choices add up to 1 (with top_k 1 the weight is the score
itself: a constant 1 would teach the router nothing).

Experts are kept busy alike without a second loss: `expert_bias` moves the *choice*, and not the weights, and is moved
after each step against the load (`mmm.parallel.expert.apply.balance_experts`). What that needs is counted here.

Plain PyTorch: this file knows nothing of meshes. ``Experts.work`` is the one place where tokens meet experts: where
each rank holds some of the experts, this is what is replaced.

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
from torch._subclasses.fake_tensor import FakeTensor

Work = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def loads(counts: Tensor, total: int) -> list[int]:
    """The numbers of `counts` (any shape, which add up to `total`) on the host, flat.

    A tensor without memory (meta, fake) has no numbers: `total` is then spread evenly, as good routing would.
    """
    n = counts.numel()
    if counts.is_meta or isinstance(counts, FakeTensor):
        return [total * (i + 1) // n - total * i // n for i in range(n)]
    return counts.flatten().tolist()


def work_out(x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Each expert's SwiGLU, ``w2(silu(w1 x) * w3 x)``, of its own rows.

    Args:
        x: (rows, dim), sorted by expert. counts: (experts,) int64, rows of each; any of them may be 0.
        w1, w3: (experts, hidden, dim). w2: (experts, dim, hidden).

    Returns:
        (rows, dim).
    """
    parts = x.split(loads(counts, len(x)))  # each (rows of an expert, dim)
    weights = zip(w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat(
        [F.linear(F.silu(F.linear(p, a)) * F.linear(p, c), b) for p, (a, b, c) in zip(parts, weights, strict=True)]
    )


class Router(nn.Module):
    """(tokens, dim) to scores (tokens, n_experts) in (0, 1), float32 or wider: in half precision the order of close
    scores would be left to rounding, and so to the mesh.

    Attributes:
        used: the weight as the last forward used it, through which its gradient passes.
    """

    def __init__(self, dim: int, n_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.used: Tensor | None = None
        nn.init.normal_(self.weight, std=0.02)  # once it is registered: no numbers are drawn on the meta device

    def forward(self, x: Tensor) -> Tensor:
        wide, kind = torch.promote_types(x.dtype, torch.float32), x.device.type
        no_cast = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
        self.used = self.weight.view_as(self.weight)
        with no_cast:
            return F.linear(x.to(wide), self.used.to(wide)).sigmoid()


class Experts(nn.Module):
    """The experts' matrices, one above the other.

    Attributes:
        work: the function of (rows, counts, w1, w2, w3): see `work_out`.
    """

    def __init__(self, dim: int, hidden: int, n_experts: int) -> None:
        super().__init__()
        self.work: Work = work_out
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.work(x, counts, self.w1, self.w2, self.w3)


class MixtureOfExperts(nn.Module):
    """(…, dim) in and out: `top_k` of `n_experts` experts for each token.

    Attributes:
        expert_bias: (n_experts,), added to the scores for the choice alone; saved with the model.
        counts: (n_experts,) int64, how often each expert was chosen by the tokens held here, in all forwards that have
            had their backward since this was set to None; None where there were none.
    """

    expert_bias: Tensor

    def __init__(self, dim: int, hidden: int, n_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = Router(dim, n_experts)
        self.experts = Experts(dim, hidden, n_experts)
        self.register_buffer("expert_bias", torch.zeros(n_experts))
        self.counts: Tensor | None = None

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
        return (weight.unsqueeze(-1) * back).sum(1).to(x.dtype).view_as(x)

    def _count_in_backward(self, counts: Tensor) -> None:
        """Count when the router's weight gets its gradient of this forward. That is once for each token trained on: not
        in an evaluation, not again where activation checkpointing repeats the forward (what it builds then has no
        backward of its own), and not where a pipeline tries out what shapes pass between its stages."""

        def add(_: Tensor) -> None:
            self.counts = counts if self.counts is None else self.counts + counts

        weight, self.router.used = self.router.used, None
        if weight is not None and weight.requires_grad:
            weight.register_hook(add)


def has_experts(model: nn.Module) -> bool:
    """Whether a model has a layer of routed experts."""
    return any(isinstance(module, MixtureOfExperts) for module in model.modules())
