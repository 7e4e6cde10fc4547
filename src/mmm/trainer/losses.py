"""Local losses on the device, from one row that is due to the next, and the first of them that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class NotFinite(NamedTuple):
    """Where the run was, what the global loss was there, and the ranks whose local losses made it so."""

    at: Mapping[str, int]
    loss: float
    ranks: list[int]

    def text(self, hosts: Sequence[str]) -> str:
        """
        Args:
            hosts: by rank.
        """
        places = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in self.ranks[:8])
        others = f" and {len(self.ranks) - 8} more" if len(self.ranks) > 8 else ""
        when = " ".join(f"{'step' if key == 'iter' else key} {value}" for key, value in self.at.items())
        return f"the loss is {self.loss} at {when}, from {places}{others}"


class UnreadLosses:
    """The local losses since the last row that was due. The host knows none of them, and waits for none."""

    COLUMNS = 3

    def __init__(self) -> None:
        self._at: list[Mapping[str, int]] = []
        self._losses: list[Tensor] = []

    def add(self, at: Mapping[str, int], loss: Tensor) -> None:
        """
        Args:
            at: where the run is. loss: a scalar without graph; always of the same dtype, on the same device.
        """
        self._at.append(at)
        self._losses.append(loss)

    def columns(self) -> Tensor:
        """The last loss; the number of the first that is not finite, from 1, or 0; and its value: (3,)."""
        losses = torch.stack(self._losses)
        wrong = ~losses.isfinite()
        first = wrong.int().argmax(0, keepdim=True)  # the first of several
        return torch.cat((losses[-1:], torch.where(wrong.any(), first + 1, 0).to(losses), losses.gather(0, first)))

    def read(self, columns: np.ndarray, ranks: Sequence[int], total: float) -> NotFinite | None:
        """Where the loss first was not finite, if anywhere; then the losses are forgotten.

        Args:
            columns: of each of `ranks`, those with a part of the global loss: (ranks, 3). total: the last global loss.
        """
        at, self._at, self._losses = self._at, [], []
        numbers = columns[:, 1]
        if numbers.any():
            first = int(numbers[numbers > 0].min())
            (wrong,) = np.nonzero(numbers == first)
            loss = total if first == len(at) else sum(columns[wrong, 2].tolist())
            return NotFinite(at[first - 1], loss, [ranks[place] for place in wrong.tolist()])
        return None if math.isfinite(total) else NotFinite(at[-1], total, list(ranks))  # their sum alone is not
