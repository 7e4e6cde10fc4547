"""The rows of a run: what is logged of one or more steps, and the losses and norms of gradients that the steps from one
row to the next leave on the device, where one may not be finite."""

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

from mmm.runtime.clock import OWN
from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.runtime.ranks import Rank

RECENT_ROWS = 50


@dataclass
class Row:
    """What is logged of one or more steps.

    Attributes:
        at: where the run is, such as ``{"iter": 3}``.
        loss: of the global batch.
        samples: of a step, or of the epoch, of all ranks.
        tokens: likewise; 0 where samples are no tokens.
        numbers: on rank 0, by name, in the order of the log's line; hooks may add to them. Empty on the other ranks.
        per_rank: on rank 0, seconds of a step, or of the epoch, and of its parts, (ranks,): as `StepClock.read`, means
            since the row before.
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
            seconds: of rank 0, as `StepClock.read`.
            numbers: further ones.
            per_rank: every rank's seconds.
        """
        parts = {part: value for part, value in seconds.items() if part != OWN}  # per rank, or not known
        self.numbers = {**self.at, name: self.loss, **parts, **numbers, "sps": self.samples / seconds["dt"]}
        if self.tokens:
            self.numbers["tps"] = self.tokens / seconds["dt"]
        self.per_rank = {part: each for part, each in per_rank.items() if part != OWN or np.isfinite(each).all()}


@dataclass
class Totals:
    """What the rows of a run add up to, on rank 0. A row's seconds are the mean of the steps since the
    row before.

    Attributes:
        first: the step that this process begins with: 0 unless it goes on from a checkpoint.
        made: steps that the rows are of, or epochs.
        seconds: in steps. samples, tokens: of all ranks.
        at: the step of the last row, as ("iter", 19), or its epoch. last: the last of each number.
        recent: seconds of a step, or epoch, of the last rows, without the first, which starts what is slow to start.
    """

    first: int = 0
    made: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    at: tuple[str, int] | None = None
    last: dict[str, float] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    _before: int | None = None  # the step of the row before

    def add(self, row: Row) -> None:
        if self.at is not None:
            self.recent.append(row.numbers["dt"])
        step = row.at.get("iter")
        self.at = next(((name, row.at[name]) for name in ("iter", "epoch") if name in row.at), ("row", 0))
        self.last |= row.numbers
        steps = 1  # of an epoch's row, and where another training begins
        if step is not None:
            before = self.first - 1 if self._before is None else self._before
            steps = max(step - before, 1)
        self._before = step
        self.made += steps
        self.seconds += steps * row.numbers["dt"]
        self.samples += steps * row.samples
        self.tokens += steps * row.tokens

    @property
    def count(self) -> int:
        """Steps that are done, or epochs, with those before a checkpoint that the run goes on from."""
        name, number = self.at or ("row", 0)
        return number + 1 if name == "iter" else number

    def left(self, total: float | None) -> float | None:
        """Seconds for the rest of so many steps, or epochs, at the pace of the last rows; None where there is no rest,
        or no pace is known."""
        if total is None or not self.recent or total <= self.count:
            return None
        return (total - self.count) * sum(self.recent) / len(self.recent)

    def rates(self) -> dict[str, float]:
        """Mean samples a second (``sps``), and tokens where there are (``tps``); empty without a row."""
        amounts = {"sps": self.samples, "tps": self.tokens}
        return {name: amount / self.seconds for name, amount in amounts.items() if amount and self.seconds > 0}


def on_host(table: Tensor) -> np.ndarray:
    return table.cpu().numpy()


def sums_in_order(table: np.ndarray) -> list[float]:
    """Of each column, row after row: the same to the last bit wherever it is computed. Python's `sum` differs from 3.12
    on, and NumPy's adds pairs."""
    return table.cumsum(0, dtype=np.float64)[-1].tolist()


class NotFinite(NamedTuple):
    """Where the run was, and the ranks on which something was not finite.

    Attributes:
        loss: the sum of those ranks' local losses; None where the losses were finite, and a gradient was not.
        parameter: whose gradient it was on this rank, the first of several; "" on ranks that are not among `ranks`.
    """

    at: Mapping[str, int]
    loss: float | None
    ranks: list[int]
    parameter: str = ""

    def text_on_all(self, rank: Rank) -> str:
        """`text`, on every rank. A collective: each knows its host, and the first of `ranks` the parameter's name."""
        hosts = gather_objects(rank, socket.gethostname())
        parameter = self.parameter if self.loss is not None else broadcast_object(self.parameter, self.ranks[0])
        return broadcast_object(self.text(hosts, parameter) if rank.is_main else "")

    def text(self, hosts: Sequence[str], parameter: str) -> str:
        """
        Args:
            hosts: by rank. parameter: of the first of `ranks`, for a gradient.
        """
        places = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in self.ranks[:8])
        others = f" and {len(self.ranks) - 8} more" if len(self.ranks) > 8 else ""
        when = " ".join(f"{'step' if key == 'iter' else key} {value}" for key, value in self.at.items())
        if self.loss is None:
            return f"the gradient of {parameter} is not finite at {when}, on {places}{others}"
        return f"the loss is {self.loss} at {when}, from {places}{others}"


class LossColumns(NamedTuple):
    """What each rank knows of the steps since the last row that was due: scalars of one rank, or (ranks,) of all.

    Attributes:
        loss: of the row, the rank's own.
        first: the number of the first step that is not finite, from 1; 0 for none.
        loss_there: the loss of that step.
        gradient: the number of the gradient that is not finite there, from 1; 0 where it is the loss.
        skipped: steps that were skipped.
        trailing: those of them up to now, without one between them that was not.
    """

    loss: Tensor
    first: Tensor
    loss_there: Tensor
    gradient: Tensor
    skipped: Tensor
    trailing: Tensor

    @classmethod
    def of_table(cls, table: Tensor) -> LossColumns:
        """Of all ranks' tensors, (ranks, columns); there may be more columns."""
        return cls(*table[:, : len(cls._fields)].unbind(1))


class UnreadLosses:
    """What the steps since the last row that was due have left on the device. The host knows none of it, and waits for
    none.

    Attributes:
        by_step: the loop adds each step itself, with norms; else a row adds its own loss.
        in_a_row: steps that were skipped up to the last row that was due, without one between them that was not.
        skip_noted: it has been said that a step was skipped.
    """

    COLUMNS = len(LossColumns._fields)

    def __init__(self) -> None:
        self.by_step, self.in_a_row, self.skip_noted = False, 0, False
        self._clear()

    def _clear(self) -> None:
        self._at: list[Mapping[str, int]] = []
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._names: list[Sequence[str]] = []
        self._skips: list[Tensor] = []

    def add(self, at: Mapping[str, int], loss: Tensor) -> None:
        """
        Args:
            at: where the run is. loss: a scalar without graph; always of the same dtype, on the same device.
        """
        self._at.append(at)
        self._losses.append(loss)

    def add_step(
        self, at: Mapping[str, int], loss: Tensor, norms: Tensor, names: Sequence[str], skip: Tensor | None
    ) -> None:
        """`add`, with more.

        Args:
            norms: (gradients,) of this rank's gradients. names: of their parameters. skip: 1.0 on every rank where the
                step is skipped, else 0.0; None where steps are not skipped.
        """
        self.by_step = True
        self.add(at, loss)
        self._norms.append(norms)
        self._names.append(names)
        if skip is not None:
            self._skips.append(skip)

    def columns(self, loss: Tensor) -> Tensor:
        """This rank's `LossColumns` as one tensor, (6,).

        Args:
            loss: of the row, this rank's.
        """
        losses = torch.stack(self._losses)
        by_loss = ~losses.isfinite()  # (steps,)
        wrong, gradient = by_loss, torch.zeros_like(by_loss, dtype=torch.int64)
        if self._norms:
            by_gradient = ~pad_sequence(self._norms, batch_first=True).to(losses.device).isfinite()  # (steps, norms)
            wrong = by_loss | by_gradient.any(1)
            gradient = torch.where(by_loss, 0, by_gradient.int().argmax(1) + 1)
        first = wrong.int().argmax(0, keepdim=True)  # the first of several
        skips = torch.stack(self._skips) if self._skips else losses.new_zeros(1)
        own = LossColumns(
            loss=loss.view(1),
            first=torch.where(wrong.any(), first + 1, 0),
            loss_there=losses.gather(0, first),
            gradient=gradient.gather(0, first),
            skipped=skips.sum(0, keepdim=True),
            trailing=skips.flip(0).cumprod(0).sum(0, keepdim=True),
        )
        return torch.cat([column.to(losses) for column in own])

    @staticmethod
    def summary(columns: Tensor, loss_ranks: slice) -> Tensor:
        """What a row needs of all ranks' `columns`: the losses of `loss_ranks`; the first step that is not finite, from
        1, or 0; the steps skipped, and those in a row.

        Args:
            columns: of every rank, (ranks, 6); there may be more. loss_ranks: those with a part of the global loss.

        Returns:
            (losses + 3,), on the columns' device.
        """
        by_rank = LossColumns.of_table(columns)
        losses, skips = by_rank.loss[loss_ranks], torch.stack((by_rank.skipped[0], by_rank.trailing[0]))
        wrong = by_rank.gradient > 0
        wrong[loss_ranks] = True
        wrong &= by_rank.first > 0
        first = torch.where(wrong, by_rank.first, math.inf).amin(0, keepdim=True)
        return torch.cat((losses, first.where(first.isfinite(), 0), skips))

    def read(
        self, summary: np.ndarray, columns: Tensor, loss_ranks: slice, rank: int
    ) -> tuple[float, NotFinite | None, int | None]:
        """The row's loss; where something first was not finite, if anywhere; how many steps were skipped, None where
        none may be. Then all is forgotten.

        Args:
            summary: of `columns` and `loss_ranks`, on the host. columns: only read where something is not finite.
            rank: this one.
        """
        at, names, skips = self._at, self._names, len(self._skips)
        self._clear()
        (total,) = sums_in_order(summary[:-3, None])
        first, skipped, trailing = map(int, summary[-3:])
        self.in_a_row = trailing if trailing < skips else self.in_a_row + trailing
        found = None
        if first:
            found = self._found(first, at, names, LossColumns(*on_host(columns[:, : self.COLUMNS]).T), loss_ranks, rank)
        elif not math.isfinite(total):  # the sum alone is not
            found = NotFinite(at[-1], total, list(range(len(columns))[loss_ranks]))
        return total, found, skipped if skips else None

    @staticmethod
    def _found(
        first: int,
        at: Sequence[Mapping[str, int]],
        names: Sequence[Sequence[str]],
        by_rank: LossColumns,
        loss_ranks: slice,
        rank: int,
    ) -> NotFinite:
        counted = by_rank.gradient > 0
        counted[loss_ranks] = True
        (ranks,) = np.nonzero(counted & (by_rank.first == first))
        by_loss = ranks[by_rank.gradient[ranks] == 0]
        if len(by_loss):
            return NotFinite(at[first - 1], sum(by_rank.loss_there[by_loss].tolist()), by_loss.tolist())
        parameter = names[first - 1][int(by_rank.gradient[rank]) - 1] if rank in ranks else ""
        return NotFinite(at[first - 1], None, ranks.tolist(), parameter)
