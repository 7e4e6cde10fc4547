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
from torch.nn.utils.rnn import pad_sequence

from mmm.run.comm import TorchComm
from mmm.runtime.clock import OWN

RECENT_ROWS = 50


@dataclass
class Row:
    """What is logged of one or more steps.

    Attributes:
        place: where the run is, such as ``{"iter": 3}``.
        loss: of the global batch.
        samples: number of samples of a step, or of the epoch, over all ranks.
        tokens: number of tokens in them; 0 where samples are not text.
        numbers: on rank 0, by name, in the order of the log's line. Hooks may add to them. Empty on the other ranks.
        per_rank: on rank 0, seconds of a step, or of the epoch, and of its parts, (ranks,): as `StepClock.read`, means
            over the steps since the row before.
        line: for the log. Empty where no hook has made one.
    """

    place: Mapping[str, int]
    loss: float
    samples: int
    tokens: int
    numbers: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, np.ndarray] = field(default_factory=dict)
    line: str = ""

    def fill(
        self,
        loss_name: str,
        seconds: Mapping[str, float],
        numbers: Mapping[str, Any],
        per_rank: dict[str, np.ndarray],
    ) -> None:
        """Put in what rank 0 knows.

        Args:
            seconds: of rank 0, as `StepClock.read`.
            numbers: further ones.
            per_rank: every rank's seconds.
        """
        # What a rank's own work took is known of all ranks or of none.
        parts = {part: value for part, value in seconds.items() if part != OWN}
        self.numbers = {**self.place, loss_name: self.loss, **parts, **numbers, "sps": self.samples / seconds["dt"]}
        if self.tokens:
            self.numbers["tps"] = self.tokens / seconds["dt"]
        self.per_rank = {part: values for part, values in per_rank.items() if part != OWN or np.isfinite(values).all()}


@dataclass
class Totals:
    """What the rows of a run add up to, on rank 0. A row's seconds are the mean over the steps since the row before.

    Attributes:
        first: the step that this process begins with: 0 unless it goes on from a checkpoint.
        made: number of steps, or epochs, that the rows are of.
        seconds: spent in steps.
        samples: of all ranks.
        tokens: of all ranks.
        place: the step of the last row, as ("iter", 19), or its epoch.
        last: the last value of each number.
        recent: seconds per step, or epoch, of the last rows. The first row is left out: it includes warm-up.
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
            self.recent.append(row.numbers["dt"])
        step = row.place.get("iter")
        self.place = next(((name, row.place[name]) for name in ("iter", "epoch") if name in row.place), ("row", 0))
        self.last |= row.numbers
        steps = 1  # of an epoch's row, and where another training begins
        if step is not None:
            before = self.first - 1 if self._step_before is None else self._step_before
            steps = max(step - before, 1)
        self._step_before = step
        self.made += steps
        self.seconds += steps * row.numbers["dt"]
        self.samples += steps * row.samples
        self.tokens += steps * row.tokens

    @property
    def count(self) -> int:
        """Steps, or epochs, that are done, with those before a checkpoint that the run goes on from."""
        name, number = self.place or ("row", 0)
        return number + 1 if name == "iter" else number

    def left(self, total: float | None) -> float | None:
        """Seconds for the rest of `total` steps, or epochs, at the pace of the last rows. None where there is no rest,
        or no pace is known."""
        if total is None or not self.recent or total <= self.count:
            return None
        return (total - self.count) * sum(self.recent) / len(self.recent)

    def rates(self) -> dict[str, float]:
        """Mean samples per second (``sps``), and tokens where there are some (``tps``). Empty without a row."""
        amounts = {"sps": self.samples, "tps": self.tokens}
        return {name: amount / self.seconds for name, amount in amounts.items() if amount and self.seconds > 0}


@dataclass
class RowSoFar:
    """The losses of the steps of a row under way, such as those of an epoch.

    Attributes:
        steps: in the row so far.
        counted: the steps that were not skipped; on the device where steps may be.
        loss: this rank's, summed over them. None before the first.
    """

    steps: int = 0
    counted: float | Tensor = 0
    loss: Tensor | None = None

    def add(self, loss: Tensor, skip: Tensor | None) -> None:
        """
        Args:
            skip: 1.0 where the step was skipped, and then does not count. None: it counts.
        """
        one: float | Tensor = 1
        if skip is not None:
            loss = loss.where(skip == 0, 0)
            one = 1 - skip
        self.steps += 1
        self.counted = self.counted + one
        self.loss = loss if self.loss is None else self.loss + loss

    def mean(self) -> Tensor:
        """This rank's mean loss, of a row with a step."""
        assert self.loss is not None
        return self.loss / self.counted


def on_host(table: Tensor) -> np.ndarray:
    return table.cpu().numpy()


def sums_in_order(table: np.ndarray) -> list[float]:
    """The sum of each column, row after row: the same to the last bit wherever it is computed.

    Python's `sum` differs from 3.12 on, and NumPy's adds pairs.
    """
    return table.cumsum(0, dtype=np.float64)[-1].tolist()


class NotFinite(NamedTuple):
    """Where something was not finite, and on which ranks.

    Attributes:
        place: where the run was.
        loss: the sum of those ranks' local losses. None where the losses were finite, and a gradient was not.
        ranks: on which it was not finite.
        parameter: whose gradient it was on this rank, the first of several; "" on ranks that are not among `ranks`.
    """

    place: Mapping[str, int]
    loss: float | None
    ranks: list[int]
    parameter: str = ""

    def text_on_all(self, comm: TorchComm) -> str:
        """`text`, on every rank. A collective: each rank knows its host, and the first of `ranks` the parameter."""
        hosts = comm.gather(socket.gethostname())
        parameter = self.parameter
        if self.loss is None:
            parameter = comm.broadcast(self.parameter, self.ranks[0])
        return comm.broadcast(self.text(hosts, parameter) if comm.rank.is_main else "")

    def text(self, hosts: Sequence[str], parameter: str) -> str:
        """
        Args:
            hosts: by rank.
            parameter: of the first of `ranks`, for a gradient.
        """
        places = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in self.ranks[:8])
        others = f" and {len(self.ranks) - 8} more" if len(self.ranks) > 8 else ""
        when = " ".join(f"{'step' if name == 'iter' else name} {value}" for name, value in self.place.items())
        if self.loss is None:
            return f"the gradient of {parameter} is not finite at {when}, on {places}{others}"
        return f"the loss is {self.loss} at {when}, from {places}{others}"


class LossColumns(NamedTuple):
    """What each rank knows of the steps since the last row that was due: scalars of one rank, or (ranks,) of all.

    Attributes:
        loss: of the row, the rank's own.
        first: which of the steps is the first that is not finite, from 1; 0 for none.
        loss_of_first: the loss of that step.
        gradient: which of its gradients is not finite, from 1; 0 where it is the loss.
        skipped: number of steps that were skipped.
        trailing: number of the last steps that were all skipped.
    """

    loss: Tensor
    first: Tensor
    loss_of_first: Tensor
    gradient: Tensor
    skipped: Tensor
    trailing: Tensor

    @classmethod
    def of_table(cls, table: Tensor) -> LossColumns:
        """All ranks' columns, from a table of (ranks, columns), which may have more."""
        return cls(*table[:, : len(cls._fields)].unbind(1))


@dataclass
class StepOnDevice:
    """What a step has left on the device.

    Attributes:
        place: where the run was.
        loss: this rank's, a scalar without graph.
        norms: (gradients,), of this rank. None where the program did not look at them.
        names: of the gradients' parameters.
        skip: 1.0 on every rank where the step was skipped, else 0.0. None where steps are not skipped.
    """

    place: Mapping[str, int]
    loss: Tensor
    norms: Tensor | None = None
    names: Sequence[str] = ()
    skip: Tensor | None = None


class UnreadSteps:
    """The steps since the last row that was due. The host knows none of their numbers, and waits for none.

    Attributes:
        skipped_in_a_row: steps that were skipped up to the last row that was due, without another between them.
        has_said_skip: whether the user knows that a step was skipped.
    """

    COLUMNS = len(LossColumns._fields)

    def __init__(self) -> None:
        self.skipped_in_a_row = 0
        self.has_said_skip = False
        self._checks_steps = False
        self._steps: list[StepOnDevice] = []
        self._counts: list[tuple[int, Tensor]] = []

    def add_step(
        self, place: Mapping[str, int], loss: Tensor, norms: Tensor, names: Sequence[str], skip: Tensor | None
    ) -> None:
        """Add a step that the program has checked. The arguments are the attributes of `StepOnDevice`."""
        self._checks_steps = True
        self._steps.append(StepOnDevice(place, loss, norms, names, skip))

    def add_row(self, place: Mapping[str, int], loss: Tensor) -> None:
        """Add the loss of a row of a program that does not check its steps."""
        if not self._checks_steps:
            self._steps.append(StepOnDevice(place, loss))

    def add_count(self, step: int, count: Tensor) -> None:
        """Add the number of targets in the global batch of a step."""
        self._counts.append((step, count))

    def step_without_targets(self) -> int | None:
        """The first step since the last call whose global batch had no target. The host waits for the device."""
        if not self._counts:
            return None
        steps, counts = zip(*self._counts, strict=True)
        self._counts.clear()
        by_step = dict(zip(steps, torch.stack(counts).tolist(), strict=True))
        return next((step for step, count in by_step.items() if count == 0), None)

    def columns(self, row_loss: Tensor) -> Tensor:
        """This rank's `LossColumns` as one tensor, (6,).

        Args:
            row_loss: this rank's loss of the row.
        """
        losses = torch.stack([step.loss for step in self._steps])  # (steps,)
        norms = [step.norms for step in self._steps if step.norms is not None]
        skips = [step.skip for step in self._steps if step.skip is not None]
        by_loss = ~losses.isfinite()
        wrong = by_loss
        gradient = torch.zeros_like(by_loss, dtype=torch.int64)
        if norms:
            by_gradient = ~pad_sequence(norms, batch_first=True).to(losses.device).isfinite()  # (steps, norms)
            wrong = by_loss | by_gradient.any(1)
            gradient = torch.where(by_loss, 0, by_gradient.int().argmax(1) + 1)
        first = wrong.int().argmax(0, keepdim=True)  # the first of several
        skipped = torch.stack(skips) if skips else losses.new_zeros(1)
        own = LossColumns(
            loss=row_loss.view(1),
            first=torch.where(wrong.any(), first + 1, 0),
            loss_of_first=losses.gather(0, first),
            gradient=gradient.gather(0, first),
            skipped=skipped.sum(0, keepdim=True),
            trailing=skipped.flip(0).cumprod(0).sum(0, keepdim=True),
        )
        return torch.cat([column.to(losses) for column in own])

    @staticmethod
    def summary(columns: Tensor, loss_ranks: slice) -> Tensor:
        """What a row needs of all ranks' `columns`.

        Args:
            columns: of every rank, (ranks, 6); there may be more.
            loss_ranks: those with a part of the global loss.

        Returns:
            (losses + 3,), on the columns' device: the losses of `loss_ranks`; the first step that is not finite, from
            1, or 0; the steps skipped, and those in a row.
        """
        by_rank = LossColumns.of_table(columns)
        wrong = by_rank.gradient > 0
        wrong[loss_ranks] = True
        wrong &= by_rank.first > 0
        first = torch.where(wrong, by_rank.first, math.inf).amin(0, keepdim=True)
        first = first.where(first.isfinite(), 0)
        skips = torch.stack((by_rank.skipped[0], by_rank.trailing[0]))
        return torch.cat((by_rank.loss[loss_ranks], first, skips))

    def read(
        self, summary: np.ndarray, columns: Tensor, loss_ranks: slice, rank: int
    ) -> tuple[float, NotFinite | None, int | None]:
        """Read what a row needs, and forget the steps.

        Args:
            summary: of `columns` and `loss_ranks`, on the host.
            columns: only read where something is not finite.
            rank: this one.

        Returns:
            The row's loss; where something first was not finite, if anywhere; how many steps were skipped, None where
            none may be.
        """
        steps = self._steps
        self._steps = []
        may_skip = [step for step in steps if step.skip is not None]
        (total,) = sums_in_order(summary[:-3, None])
        first, skipped, trailing = map(int, summary[-3:])
        if trailing < len(may_skip):
            self.skipped_in_a_row = trailing
        else:
            self.skipped_in_a_row += trailing
        not_finite = None
        if first:
            by_rank = LossColumns(*on_host(columns[:, : self.COLUMNS]).T)
            not_finite = _where(steps[first - 1], first, by_rank, loss_ranks, rank)
        elif not math.isfinite(total):  # the losses are finite, and their sum is not
            not_finite = NotFinite(steps[-1].place, total, list(range(len(columns))[loss_ranks]))
        return total, not_finite, skipped if may_skip else None


def _where(step: StepOnDevice, first: int, by_rank: LossColumns, loss_ranks: slice, rank: int) -> NotFinite:
    """On which ranks a step's loss, or else one of its gradients, was not finite."""
    counts = by_rank.gradient > 0
    counts[loss_ranks] = True
    (ranks,) = np.nonzero(counts & (by_rank.first == first))
    by_loss = ranks[by_rank.gradient[ranks] == 0]
    if len(by_loss):
        return NotFinite(step.place, sum(by_rank.loss_of_first[by_loss].tolist()), by_loss.tolist())
    parameter = ""
    if rank in ranks:
        parameter = step.names[int(by_rank.gradient[rank]) - 1]
    return NotFinite(step.place, None, ranks.tolist(), parameter)
