"""The next token, drawn from logits: a function of logits, seed and the token's number, the same on every device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmm.nn.draw import stream_key, uniform01


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0: the most probable token, always.
        top_k: only among so many of the most probable. None: all.
        top_p: only among the most probable, as few as have this probability together (Holtzman et al., "The curious
            case of neural text degeneration", 2020). 1: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong: a field, and what it must be."""
        problems = []
        if not 0 <= self.temperature < math.inf:
            problems.append(("temperature", "it must be a number from 0 on, and finite"))
        if self.top_k is not None and self.top_k < 1:
            problems.append(("top_k", "it must be at least 1"))
        if not 0 < self.top_p <= 1:
            problems.append(("top_p", "it must be above 0, and at most 1"))
        return problems

    def draw(self, logits: Tensor, token_index: int) -> int:
        """A token.

        Args:
            logits: (tokens,). token_index: of the token in its text: each draws a number of its own.
        """
        wide = logits.detach().to("cpu").double()
        if self.temperature == 0:
            return int(wide.argmax())
        ordered, tokens = ((wide - wide.max()) / self.temperature).sort(descending=True, stable=True)
        ordered, tokens = ordered[: self.top_k], tokens[: self.top_k]
        total = ordered.softmax(0).cumsum(0)
        if self.top_p < 1:
            total = total[: int((total < self.top_p).sum()) + 1]
        drawn = uniform01(stream_key(self.seed, "sample"), torch.tensor([token_index])) * total[-1]
        return int(tokens[min(int(torch.searchsorted(total, drawn)), len(total) - 1)])


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens, int64, and their probabilities, float32, as the model has them: before
    temperature and the rest of `Sampling`. Each (count,), or as many as there are.

    Args:
        logits: (tokens,).
    """
    probabilities = logits.detach().to("cpu").double().softmax(0)
    top = probabilities.topk(min(count, len(probabilities)))
    return top.indices, top.values.float()
