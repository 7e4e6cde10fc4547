"""What is logged of one or more steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmm.runtime.clock import OWN


@dataclass
class Row:
    """What is logged of one or more steps.

    Attributes:
        at: where the run is, such as ``{"iter": 3}``.
        loss: of the global batch.
        samples: since the row before, of all ranks.
        tokens: likewise; 0 where samples are no tokens.
        numbers: on rank 0, by name, in the order of the log's line; hooks may add to them. Empty on the other ranks.
        per_rank: on rank 0, seconds of each part of the step, (ranks,).
        line: for the log; empty where no hook has made one.
    """

    at: Mapping[str, int]
    loss: float
    samples: int
    tokens: int
    numbers: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, np.ndarray] = field(default_factory=dict)
    line: str = ""

    def fill(
        self,
        name: str,
        seconds: Mapping[str, float],
        numbers: Mapping[str, Any],
        per_rank: dict[str, np.ndarray],
    ) -> None:
        """Put in what rank 0 knows.

        Args:
            name: of the loss.
            seconds: of rank 0, dt and its parts.
            numbers: further ones.
            per_rank: every rank's seconds.
        """
        self.numbers = {**self.at, name: self.loss, **seconds, **numbers, "sps": self.samples / seconds["dt"]}
        if self.tokens:
            self.numbers["tps"] = self.tokens / seconds["dt"]
        self.per_rank = {part: each for part, each in per_rank.items() if part != OWN or np.isfinite(each).all()}
