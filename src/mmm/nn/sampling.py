"""Draws the next token from logits: a function of logits, seed and the token's index, the same on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmm.nn.init import stream_key, uniform01


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: what logits are divided by. 0: always take the most probable token.
        top_k: draw only among this many of the most probable tokens. None: among all.
        top_p: draw only among the fewest most probable tokens that have this probability together (Holtzman et al.,
            "The curious case of neural text degeneration", 2020). 1: among all.
        seed: of the draws.
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
        """Draw a token.

        Args:
            logits: (vocabulary,).
            token_index: the token's index in its text: each index has a random number of its own.
        """
        # On the CPU in float64, so that devices agree.
        wide = logits.detach().to("cpu").double()
        if self.temperature == 0:
            return int(wide.argmax())
        # The most probable token comes first. The largest is subtracted before the division: no overflow follows.
        scaled = (wide - wide.max()) / self.temperature
        ordered, tokens = scaled.sort(descending=True, stable=True)
        ordered = ordered[: self.top_k]
        tokens = tokens[: self.top_k]
        # The probability of a token together with all more probable ones.
        cumulative = ordered.softmax(0).cumsum(0)
        if self.top_p < 1:
            below = int((cumulative < self.top_p).sum())
            cumulative = cumulative[: below + 1]
        # A point between 0 and the total falls on a token, as often as the token is probable.
        key = stream_key(self.seed, "sample")
        index = torch.tensor([token_index])
        point = uniform01(key, index) * cumulative[-1]
        place = int(torch.searchsorted(cumulative, point))
        # Rounding may put the point behind the last one.
        last = len(cumulative) - 1
        return int(tokens[min(place, last)])


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens and their probabilities as the model has them, before temperature and other `Sampling`.

    Args:
        logits: (vocabulary,).
        count: how many tokens.

    Returns:
        Tokens, int64, and probabilities, float32: each (count,), or (vocabulary,) if that is smaller.
    """
    wide = logits.detach().to("cpu").double()
    probabilities = wide.softmax(0)
    top = probabilities.topk(min(count, len(probabilities)))
    return top.indices, top.values.float()
