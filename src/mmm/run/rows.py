"""The rows of a run: what is logged of one or more steps.

The losses of the steps, and the norms of their gradients, stay on the device until a row is due. Until then the host
does not know whether one of them is not finite, and waits for nothing.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmm.parallel.exact.trees import sum_near
from mmm.runtime.clock import OWN

# Number of rows whose pace tells how long the rest of a run takes.
RECENT_ROWS = 50
# Number of ranks that an error names.
RANKS_NAMED = 8


@dataclass
class Row:
    """What is logged of one or more steps.

    Attributes:
        place: where the run is, such as ``{"iter": 3}``.
        loss: loss of the global batch.
        samples: number of samples of a step (or of the epoch), over all ranks.
        tokens: number of tokens in them; 0 if samples are not text.
        values: on rank 0, the row's values by name, in the order of the log line. Hooks may add to them. Empty on the
            other ranks.
        per_rank: on rank 0, the seconds of a step (or of the epoch) and of its parts, each of shape (ranks,): the names
            of `StepClock.read`, means over the steps since the previous row.
        line: the line for the log. Empty if no hook has made one.
    """

    place: Mapping[str, int]
    loss: float
    samples: int
    tokens: int
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, np.ndarray] = field(default_factory=dict)
    line: str = ""

    def fill(
        self,
        loss_name: str,
        seconds: Mapping[str, float],
        values: Mapping[str, Any],
        per_rank: dict[str, np.ndarray],
    ) -> None:
        """Add what only rank 0 knows.

        Args:
            loss_name: name of the loss in the row.
            seconds: seconds of rank 0, as `StepClock.read` returns them.
            values: further values of the row.
            per_rank: seconds of every rank, by name.
        """
        self.values = {**self.place, loss_name: self.loss}
        for name, value in seconds.items():
            if name != OWN:
                self.values[name] = value
        self.values |= values
        self.values["sps"] = self.samples / seconds["dt"]
        if self.tokens:
            self.values["tps"] = self.tokens / seconds["dt"]
        self.per_rank = dict(per_rank)
        # How long a rank's own work took is NaN where its waits are not known. It is kept for all ranks or for none.
        if not np.isfinite(per_rank[OWN]).all():
            del self.per_rank[OWN]


@dataclass
class Totals:
    """Sums over the rows of a run, on rank 0. The seconds of a row are the mean over the steps since the previous one.

    Attributes:
        first: first step that this process makes: 0 unless the run resumes from a checkpoint.
        made: number of steps (or epochs) that the rows cover.
        seconds: seconds spent in steps.
        samples: number of samples, over all ranks.
        tokens: number of tokens, over all ranks.
        place: step of the last row, such as ("iter", 19), or its epoch.
        last: last value of each name.
        recent: seconds per step (or epoch) of the last rows. The first row is left out: it includes warm-up.
    """

    first: int = 0
    made: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    place: tuple[str, int] | None = None
    last: dict[str, float] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    _step_before: int | None = None

    def add(self, row: Row) -> None:
        if self.place is not None:
            self.recent.append(row.values["dt"])
        self.place = ("row", 0)
        for name in ("epoch", "iter"):
            if name in row.place:
                self.place = (name, row.place[name])
        self.last |= row.values
        step = row.place.get("iter")
        # The row of an epoch counts as one. So does the first row of a further loop, whose steps begin at 0 again.
        steps = 1
        if step is not None:
            before = self.first - 1 if self._step_before is None else self._step_before
            steps = max(step - before, 1)
        self._step_before = step
        self.made += steps
        self.seconds += steps * row.values["dt"]
        self.samples += steps * row.samples
        self.tokens += steps * row.tokens

    @property
    def count(self) -> int:
        """Number of finished steps (or epochs), including those before the checkpoint that the run resumed from."""
        name, index = self.place or ("row", 0)
        # Steps count from 0, epochs from 1.
        return index + 1 if name == "iter" else index

    def left(self, total: float | None) -> float | None:
        """Seconds that the rest of `total` steps (or epochs) takes at the pace of the last rows.

        Returns:
            None if nothing is left, or the pace is not known.
        """
        if total is None or not self.recent or total <= self.count:
            return None
        steps_left = total - self.count
        return steps_left * sum(self.recent) / len(self.recent)

    def rates(self) -> dict[str, float]:
        """Mean samples per second (``sps``), and tokens per second (``tps``) if there are some. Empty without rows."""
        if self.seconds <= 0:
            return {}
        rates = {}
        if self.samples:
            rates["sps"] = self.samples / self.seconds
        if self.tokens:
            rates["tps"] = self.tokens / self.seconds
        return rates


@dataclass
class RowSoFar:
    """The losses of the steps of the current row, such as those of an epoch.

    Attributes:
        steps: number of steps in the row so far.
        counted: number of steps that were not skipped. It is on the device if steps may be skipped.
        loss: this rank's loss, summed over them. None before the first step.
        rate: learning rate of the last update of the last step. None if it has made none.
    """

    steps: int = 0
    counted: float | Tensor = 0
    loss: Tensor | None = None
    rate: float | None = None

    def add(self, loss: Tensor, skip: Tensor | None) -> None:
        """Add a step.

        Args:
            loss: this rank's loss.
            skip: 1.0 if the step was skipped: it does not count then. None: it counts.
        """
        one: float | Tensor = 1
        if skip is not None:
            loss = loss.where(skip == 0, 0)
            one = 1 - skip
        self.steps += 1
        self.counted = self.counted + one
        self.loss = loss if self.loss is None else self.loss + loss

    def mean(self) -> Tensor:
        """This rank's mean loss. The row has at least one step."""
        assert self.loss is not None
        return self.loss / self.counted


def on_host(table: Tensor) -> np.ndarray:
    return table.cpu().numpy()


def sums_in_order(table: np.ndarray) -> list[float]:
    """The sum of each column, row after row: the same to the last bit wherever it is computed.

    Python's `sum` differs from 3.12 on, and NumPy's adds pairs.
    """
    return table.cumsum(0, dtype=np.float64)[-1].tolist()


@dataclass
class StepOnDevice:
    """What a step has left on the device.

    Attributes:
        place: where the run was.
        loss: this rank's loss, a scalar without graph.
        wrong: what is not finite: 0 for nothing, 1 for the loss, 2 for the first gradient, 3 for the second, …
        names: names of the gradients' parameters.
        skip: 1.0 on every rank if the step was skipped, else 0.0. None if steps are never skipped.
        count: number of targets in the global batch. None if it is not known.
    """

    place: Mapping[str, int]
    loss: Tensor
    wrong: Tensor
    names: Sequence[str]
    skip: Tensor | None
    count: int | Tensor | None

    def about(self) -> AboutRank:
        """What this rank says of a step that is not finite on some rank. The host waits for the device."""
        wrong = int(self.wrong)
        parameter = self.names[wrong - 2] if wrong > 1 else ""
        loss = float(self.loss) if wrong == 1 else 0.0
        return AboutRank(socket.gethostname(), wrong, loss, parameter)


class AboutRank(NamedTuple):
    """What a rank says of a step that is not finite: `StepOnDevice.wrong`, its loss, or the gradient's parameter."""

    host: str
    wrong: int
    loss: float
    parameter: str


def not_finite_text(place: Mapping[str, int], by_rank: Sequence[AboutRank]) -> str:
    """Say in a sentence on which ranks the loss, or else a gradient, was not finite.

    Args:
        place: where the run was.
        by_rank: what every rank says.
    """
    when = place_text(place)
    by_loss = [rank for rank, about in enumerate(by_rank) if about.wrong == 1]
    ranks = by_loss or [rank for rank, about in enumerate(by_rank) if about.wrong]
    named = [f"rank {rank} on {by_rank[rank].host}" for rank in ranks[:RANKS_NAMED]]
    places = ", ".join(named)
    n_others = len(ranks) - RANKS_NAMED
    if n_others > 0:
        places += f" and {n_others} more"
    if by_loss:
        loss = sum(by_rank[rank].loss for rank in by_loss)
        return f"the loss is {loss} at {when}, from {places}"
    return f"the gradient of {by_rank[ranks[0]].parameter} is not finite at {when}, on {places}"


def place_text(place: Mapping[str, int]) -> str:
    """``epoch 1 step 5``."""
    coordinates = []
    for name, value in place.items():
        noun = "step" if name == "iter" else name
        coordinates.append(f"{noun} {value}")
    return " ".join(coordinates)


class UnreadSteps:
    """The steps since the last logged row. The host knows none of their values, and waits for none.

    Attributes:
        skipped_in_a_row: number of steps that were skipped in a row, up to the last logged row.
        has_said_skip: whether the user knows that a step was skipped.
    """

    # Of `columns`.
    COLUMNS = 2

    def __init__(self) -> None:
        self.skipped_in_a_row = 0
        self.has_said_skip = False
        self._steps: list[StepOnDevice] = []

    def add(
        self,
        place: Mapping[str, int],
        loss: Tensor,
        has_loss: bool,
        norms: Tensor | None,
        names: Sequence[str],
        skip: Tensor | None,
        count: int | Tensor | None,
    ) -> None:
        """Add a step.

        Args:
            has_loss: whether this rank's loss is a part of the global one.
            norms: (gradients,), the norms of this rank's gradients. None if the program did not check them.
            place, loss, names, skip, count: the attributes of `StepOnDevice`.
        """
        is_wrong = ~loss.view(1).isfinite() if has_loss else torch.zeros(1, dtype=torch.bool, device=loss.device)
        if norms is not None:
            # (1 + gradients,)
            is_wrong = torch.cat((is_wrong, ~norms.isfinite().to(loss.device)))
        # `argmax` returns the first of several.
        first = is_wrong.int().argmax() + 1
        wrong = torch.where(is_wrong.any(), first, 0)
        self._steps.append(StepOnDevice(place, loss, wrong, names, skip, count))

    def columns(self, row_loss: Tensor) -> Tensor:
        """This rank's loss of the row, and which of the steps is the first that is not finite, counted from 1, or 0.

        The host does not wait for the device.

        Returns:
            (2,), like `row_loss`.
        """
        first = row_loss.new_zeros(1)
        if self._steps:
            # (steps,)
            is_wrong = torch.stack([step.wrong for step in self._steps]) > 0
            position = is_wrong.int().argmax(0, keepdim=True) + 1
            first = torch.where(is_wrong.any(), position, 0).to(row_loss)
        return torch.cat((row_loss.view(1), first))

    @staticmethod
    def summary(columns: Tensor, loss_ranks: slice) -> Tensor:
        """What a row needs from all ranks' `columns`.

        Args:
            columns: columns of every rank, (ranks, 2); there may be more.
            loss_ranks: the ranks whose local losses add up to the global loss.

        Returns:
            (losses + 1,), on the device of the columns: the losses of `loss_ranks`; the first step that is not finite
            on any rank, counted from 1, or 0.
        """
        losses, first = columns[:, :2].unbind(1)
        # inf on a rank on which all steps are finite.
        earliest = first.where(first > 0, math.inf).amin(0, keepdim=True)
        return torch.cat((losses[loss_ranks], earliest.where(earliest.isfinite(), 0)))

    def read(self, columns: Tensor, loss_ranks: slice, exact: bool = False) -> tuple[float, StepOnDevice | None]:
        """Read the loss of the row, and the first step that was not finite on some rank. The host waits for the device.

        Args:
            columns: columns of every rank. Only their `summary` is read.
            loss_ranks: the ranks whose local losses add up to the global loss.
            exact: whether the losses are summed by the near tree of an exact run.
        """
        summary = on_host(self.summary(columns, loss_ranks))
        # The same order of summation on every rank gives the same loss to the last bit.
        if exact:
            total = float(sum_near([*summary[:-1]]))
        else:
            (total,) = sums_in_order(summary[:-1, None])
        first = int(summary[-1])
        return total, self._steps[first - 1] if first else None

    def forget(self) -> int | None:
        """Forget the steps: the next row begins. The host waits for the device if steps may be skipped.

        Returns:
            The number of steps that were skipped. None if steps are never skipped.
        """
        skips = [step.skip for step in self._steps if step.skip is not None]
        self._steps = []
        if not skips:
            return None
        # Steps are skipped on all ranks or on none.
        skipped = on_host(torch.stack(skips))
        for skip in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
        return int(skipped.sum())
