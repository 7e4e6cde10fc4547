"""A routed feed-forward layer: many feed-forward networks ("experts"), of which each token uses a few.

::

    x ──► router: n_experts scores a token ──► + expert_bias, the top_k highest ──► sort (token, choice) by expert
    │                  │                                                                        │
    │                  ▼                                                                        ▼
    │            weight of a choice                                           experts: each computes its own tokens
    │                  │                                                                        │
    └──────────────► sum over the choices of a token: weight · output ◄───── back in the order of tokens

The layer is dropless: an expert takes all tokens that choose it, and has no capacity. Scores are sigmoids in float32 or
wider, and the weights of a token's choices add up to 1. With top_k 1 the weight is the score itself, because a constant
1 would give the router no gradient.

The load is balanced without a second loss: `expert_bias` changes the choice but not the weights.
`mmm.parallel.ep.balance.balance_experts` adjusts it after each step from the tokens that are counted here.

A router may have a softmax over all experts instead, as Mixtral and Qwen3-MoE do. It has no bias, and nothing balances
it. Its model says whether the weights of a token's choices are made to add up to 1.

Nothing here knows a mesh: expert parallelism replaces ``Experts.expert_forward``, where tokens meet experts.

Sources: Shazeer et al., "Outrageously large neural networks", 2017; Gale et al., "MegaBlocks", 2022 (dropless);
DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2 (sigmoid scores, bias); Wang et al., "Auxiliary-loss-free load balancing
strategy for mixture-of-experts", 2024; Jiang et al., "Mixtral of experts", 2024 (softmax).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.torch_private.module import is_fake

# Function of (rows, tokens per expert, w1, w2, w3).
ExpertForward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def to_host_list(counts: Tensor, total: int) -> list[int]:
    """The elements of `counts` on the host, flat. The host waits for the device.

    A meta or fake tensor has no values: `total` is then spread evenly, as balanced routing would.

    Args:
        counts: integers, in any shape.
        total: their sum.
    """
    if counts.is_meta or is_fake(counts):
        n = counts.numel()
        return [total * (i + 1) // n - total * i // n for i in range(n)]
    return counts.flatten().tolist()


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch multiplies the rows of each expert by its own matrix in one kernel: in bf16, on CUDA.

    On other devices the same function is a loop that reads the offsets on the host.

    Args:
        x: (rows, dim).
        weight: (experts, hidden, dim). A row of each has to be a multiple of 16 bytes.
    """
    if x.device.type != "cuda" or torch.version.hip:
        return False
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    # 8 elements of bf16 are 16 bytes.
    _, hidden, dim = weight.shape
    if len(x) == 0 or hidden % 8 or dim % 8:
        return False
    properties = torch.cuda.get_device_properties(x.device)
    return properties.major >= 8


def expert_forward(
    x: Tensor,
    tokens_per_expert: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    on_host: list[int] | None = None,
) -> Tensor:
    """Each expert's SwiGLU, ``w2(silu(w1 x) * w3 x)``, of its own rows.

    One product for all experts, where the device has it. Otherwise one expert after the other, for which the host has
    to know how many rows each has.

    Args:
        x: (rows, dim), sorted by expert.
        tokens_per_expert: (experts,) int64, the number of rows of each expert, which may be 0.
        w1, w3: (experts, hidden, dim).
        w2: (experts, dim, hidden).
        on_host: `tokens_per_expert` on the host, where it is known there already.

    Returns:
        (rows, dim).
    """
    if has_grouped_product(x, w1):
        # (experts,): where the rows of each expert end.
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        # (rows, hidden)
        gate = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        up = F.grouped_mm(x, w3.transpose(1, 2), offs=ends)
        hidden = F.silu(gate) * up
        return F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    if on_host is None:
        on_host = to_host_list(tokens_per_expert, len(x))
    matrices = zip(w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    outputs = []
    for rows, (gate_matrix, down_matrix, up_matrix) in zip(x.split(on_host), matrices, strict=True):
        # (rows of this expert, hidden)
        gate = F.linear(rows, gate_matrix)
        up = F.linear(rows, up_matrix)
        hidden = F.silu(gate) * up
        # (rows of this expert, dim)
        outputs.append(F.linear(hidden, down_matrix))
    return torch.cat(outputs)


class Router(nn.Module):
    """Scores of all experts for each token: (tokens, dim) to (tokens, n_experts), in (0, 1).

    Scores are float32 or wider: in half precision, rounding, and so the mesh, would decide the order of close scores.

    Attributes:
        used: the weight as the last forward used it, through which its gradient passes.
    """

    def __init__(self, dim: int, n_experts: int, softmax: bool) -> None:
        super().__init__()
        self.softmax = softmax
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.used: Tensor | None = None
        # After it is registered: nothing is drawn on the meta device.
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        device_type = x.device.type
        no_cast: AbstractContextManager = nullcontext()
        if torch.amp.is_autocast_available(device_type):
            no_cast = torch.autocast(device_type, enabled=False)
        # A view of this forward's own: its hook tells apart the backward passes of several forwards.
        self.used = self.weight.view_as(self.weight)
        with no_cast:
            logits = F.linear(x.to(accum_dtype), self.used.to(accum_dtype))
            if self.softmax:
                return logits.softmax(-1)
            return logits.sigmoid()


class Experts(nn.Module):
    """The experts' matrices, stacked along dim 0.

    Attributes:
        expert_forward: function of (rows, tokens_per_expert, w1, w2, w3). Expert parallelism replaces it.
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
    """Sends each token through `top_k` of `n_experts` experts: (…, dim) in and out.

    Args:
        softmax: whether scores are a softmax over all experts, and not sigmoids.
        norm_topk: with a softmax, whether the weights of a token's choices are divided by their sum.

    Attributes:
        expert_bias: (n_experts,), added to the scores only for the choice; saved with the model. With a softmax it
            stays 0, and is not saved.
        tokens_per_expert: (n_experts,) int64, how often this rank's tokens chose each expert, over all forwards whose
            backward has run since this was set to None; None where there were none.
    """

    expert_bias: Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        n_experts: int,
        top_k: int,
        softmax: bool = False,
        norm_topk: bool = True,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.normalized = norm_topk if softmax else top_k > 1
        self.router = Router(dim, n_experts, softmax)
        self.experts = Experts(dim, hidden, n_experts)
        self.register_buffer("expert_bias", torch.zeros(n_experts), persistent=not softmax)
        self.tokens_per_expert: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        # (tokens, dim), (tokens, n_experts)
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        # The bias changes the choice, and not the weight. A stable sort: among equal scores the lower expert wins, on
        # every device.
        biased = scores.detach() + self.expert_bias
        by_score = biased.argsort(dim=-1, descending=True, stable=True)
        # Both (tokens, top_k).
        chosen = by_score[:, : self.top_k]
        weight = scores.gather(1, chosen)
        if self.normalized:
            weight = weight / weight.sum(1, keepdim=True)
        # (tokens · top_k): the expert of each choice.
        flat = chosen.flatten()
        no_counts = torch.zeros_like(self.expert_bias, dtype=torch.int64)
        counts = no_counts.scatter_add_(0, flat, torch.ones_like(flat))
        self._count_in_backward(counts)
        # The choices, sorted by expert; choice i belongs to token i // top_k.
        order = flat.argsort(stable=True)
        token_of_choice = order // self.top_k
        # Both (tokens · top_k, dim).
        rows = tokens.index_select(0, token_of_choice)
        expert_outputs = self.experts(rows, counts)
        # Back in the order of tokens: (tokens, top_k, dim)
        outputs = expert_outputs.index_select(0, order.argsort())
        outputs = outputs.view(-1, self.top_k, x.shape[-1])
        # (tokens, dim) → (…, dim)
        combined = (weight.unsqueeze(-1) * outputs).sum(1)
        return combined.to(x.dtype).view_as(x)

    def move_bias(self, rate: float | Tensor, direction: Tensor) -> None:
        """Add ``rate · direction`` to the bias, and count anew. The bias of a softmax stays.

        Args:
            direction: (n_experts,), of -1, 0 and 1.
        """
        if not self.router.softmax:
            self.expert_bias += rate * direction.to(self.expert_bias.dtype)
        self.tokens_per_expert = None

    def _count_in_backward(self, counts: Tensor) -> None:
        """Add `counts` when the router's weight gets its gradient of this forward: once for each token trained on.

        An evaluation, a forward that activation checkpointing repeats and a pipeline's shape inference run no such
        backward, and do not count.
        """

        def add(_: Tensor) -> None:
            if self.tokens_per_expert is None:
                self.tokens_per_expert = counts
            else:
                self.tokens_per_expert = self.tokens_per_expert + counts

        weight = self.router.used
        self.router.used = None
        if weight is not None and weight.requires_grad:
            weight.register_hook(add)


def has_experts(model: nn.Module) -> bool:
    """Whether a model has a layer of routed experts."""
    return any(isinstance(module, MixtureOfExperts) for module in model.modules())
