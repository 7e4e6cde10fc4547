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

from mmm.parallel.exact.trees import sum_near
from mmm.run.comm import TorchComm
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
    """

    steps: int = 0
    counted: float | Tensor = 0
    loss: Tensor | None = None

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


class NotFinite(NamedTuple):
    """Where something was not finite, and on which ranks.

    Attributes:
        place: where the run was.
        loss: sum of the local losses of those ranks. None if the losses were finite, and a gradient was not.
        ranks: the ranks on which it was not finite.
        parameter: name of the first parameter of this rank whose gradient was not finite; "" on ranks that are not
            among `ranks`.
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
        text = ""
        # Only rank 0 knows all hosts.
        if comm.rank.is_main:
            text = self.text(hosts, parameter)
        return comm.broadcast(text)

    def text(self, hosts: Sequence[str], parameter: str) -> str:
        """Say it in a sentence.

        Args:
            hosts: host of each rank.
            parameter: parameter of the first of `ranks`, if a gradient was not finite.
        """
        named = [f"rank {rank} on {hosts[rank]}" for rank in self.ranks[:RANKS_NAMED]]
        places = ", ".join(named)
        n_others = len(self.ranks) - RANKS_NAMED
        if n_others > 0:
            places += f" and {n_others} more"
        coordinates = []
        for name, value in self.place.items():
            noun = "step" if name == "iter" else name
            coordinates.append(f"{noun} {value}")
        when = " ".join(coordinates)
        if self.loss is None:
            return f"the gradient of {parameter} is not finite at {when}, on {places}"
        return f"the loss is {self.loss} at {when}, from {places}"


class LossColumns(NamedTuple):
    """What each rank knows about the steps since the last due row: scalars of one rank, or (ranks,) of all.

    Attributes:
        loss: the rank's own loss of the row.
        first: which of the steps is the first that is not finite, counted from 1; 0 for none.
        loss_of_first: the loss of that step.
        gradient: which of its gradients is not finite, counted from 1; 0 if it is the loss.
        skipped: number of steps that were skipped.
        trailing: number of skipped steps at the end, after the last one that was not skipped.
    """

    loss: Tensor
    first: Tensor
    loss_of_first: Tensor
    gradient: Tensor
    skipped: Tensor
    trailing: Tensor

    @classmethod
    def of_table(cls, table: Tensor) -> LossColumns:
        """The columns of all ranks, from a table of shape (ranks, columns), which may have more columns."""
        columns = table[:, : len(cls._fields)]
        return cls(*columns.unbind(1))


@dataclass
class StepOnDevice:
    """What a step has left on the device.

    Attributes:
        place: where the run was.
        loss: this rank's loss, a scalar without graph.
        norms: (gradients,), the norms of this rank's gradients. None if the program did not check them.
        names: names of the gradients' parameters.
        skip: 1.0 on every rank if the step was skipped, else 0.0. None if steps are never skipped.
    """

    place: Mapping[str, int]
    loss: Tensor
    norms: Tensor | None = None
    names: Sequence[str] = ()
    skip: Tensor | None = None


class UnreadSteps:
    """The steps since the last logged row. The host knows none of their values, and waits for none.

    Attributes:
        skipped_in_a_row: number of steps that were skipped in a row, up to the last logged row.
        has_said_skip: whether the user knows that a step was skipped.
    """

    COLUMNS = len(LossColumns._fields)

    def __init__(self) -> None:
        self.skipped_in_a_row = 0
        self.has_said_skip = False
        # Whether the program checks the steps of the current row.
        self._checks_steps = False
        self._steps: list[StepOnDevice] = []
        # Each step's index and number of targets, on the device.
        self._counts: list[tuple[int, Tensor]] = []

    def add_step(
        self,
        place: Mapping[str, int],
        loss: Tensor,
        norms: Tensor,
        names: Sequence[str],
        skip: Tensor | None,
    ) -> None:
        """Add a step that the program has checked. The arguments are the attributes of `StepOnDevice`."""
        self._checks_steps = True
        self._steps.append(StepOnDevice(place, loss, norms, names, skip))

    def add_row(self, place: Mapping[str, int], loss: Tensor) -> None:
        """Add the loss of a row. Does nothing if the program has checked the row's steps: they are there already."""
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
        # One copy to the host for all steps.
        counts_on_host = torch.stack(counts).tolist()
        for step, count in zip(steps, counts_on_host, strict=True):
            if count == 0:
                return step
        return None

    def columns(self, row_loss: Tensor) -> Tensor:
        """This rank's `LossColumns` as one tensor, (6,). The host does not wait for the device.

        Args:
            row_loss: this rank's loss of the row.
        """
        # (steps,)
        losses = torch.stack([step.loss for step in self._steps])
        norms = [step.norms for step in self._steps if step.norms is not None]
        skips = [step.skip for step in self._steps if step.skip is not None]
        by_loss = ~losses.isfinite()
        wrong = by_loss
        gradient = torch.zeros_like(by_loss, dtype=torch.int64)
        if norms:
            # (steps, norms); the zeros of the padding are finite.
            by_gradient = ~pad_sequence(norms, batch_first=True).to(losses.device).isfinite()
            wrong = by_loss | by_gradient.any(1)
            first_gradient = by_gradient.int().argmax(1) + 1
            gradient = torch.where(by_loss, 0, first_gradient)
        # `argmax` returns the first of several.
        first = wrong.int().argmax(0, keepdim=True)
        skipped = torch.stack(skips) if skips else losses.new_zeros(1)
        # Each of shape (1,).
        own = LossColumns(
            loss=row_loss.view(1),
            first=torch.where(wrong.any(), first + 1, 0),
            loss_of_first=losses.gather(0, first),
            gradient=gradient.gather(0, first),
            skipped=skipped.sum(0, keepdim=True),
            # From the end, the product is 1 up to the last step that was not skipped.
            trailing=skipped.flip(0).cumprod(0).sum(0, keepdim=True),
        )
        return torch.cat([column.to(losses) for column in own])

    @staticmethod
    def summary(columns: Tensor, loss_ranks: slice) -> Tensor:
        """What a row needs from all ranks' `columns`.

        Args:
            columns: columns of every rank, (ranks, 6); there may be more.
            loss_ranks: the ranks whose local losses add up to the global loss.

        Returns:
            (losses + 3,), on the device of the columns: the losses of `loss_ranks`; the first step that is not finite,
            counted from 1, or 0; the number of skipped steps; the number of those at the end.
        """
        by_rank = LossColumns.of_table(columns)
        # A loss counts only on the ranks that have a part of the global one, a gradient on every rank.
        wrong = by_rank.gradient > 0
        wrong[loss_ranks] = True
        wrong &= by_rank.first > 0
        # The earliest step of all ranks; inf if there is none.
        first = torch.where(wrong, by_rank.first, math.inf).amin(0, keepdim=True)
        first = first.where(first.isfinite(), 0)
        # Steps are skipped on all ranks or on none: rank 0 knows it for all.
        skips = torch.stack((by_rank.skipped[0], by_rank.trailing[0]))
        return torch.cat((by_rank.loss[loss_ranks], first, skips))

    def read(
        self,
        columns: Tensor,
        loss_ranks: slice,
        rank: int,
        exact: bool = False,
    ) -> tuple[float, NotFinite | None, int | None]:
        """Read what a row needs, and forget the steps. The host waits for the device.

        Args:
            columns: columns of every rank. Only their `summary` is read, unless something is not finite.
            loss_ranks: the ranks whose local losses add up to the global loss.
            rank: this rank.
            exact: whether the losses are summed by the near tree of an exact run.

        Returns:
            The loss of the row; where something first was not finite, or None; the number of skipped steps, or None if
            steps are never skipped.
        """
        summary = on_host(self.summary(columns, loss_ranks))
        steps = self._steps
        self._steps = []
        # Whether steps are checked is known anew for each row: another loop may do otherwise.
        self._checks_steps = False
        may_skip = [step for step in steps if step.skip is not None]
        # The same order of summation on every rank gives the same loss to the last bit.
        if exact:
            total = float(sum_near([*summary[:-3]]))
        else:
            (total,) = sums_in_order(summary[:-3, None])
        first, skipped, trailing = map(int, summary[-3:])
        if trailing < len(may_skip):
            self.skipped_in_a_row = trailing
        else:
            self.skipped_in_a_row += trailing
        not_finite = None
        if first:
            table = on_host(columns[:, : self.COLUMNS])
            by_rank = LossColumns(*table.T)
            not_finite = _where(steps[first - 1], first, by_rank, loss_ranks, rank)
        elif not math.isfinite(total):
            # Each loss is finite, and their sum is not.
            ranks = range(len(columns))[loss_ranks]
            not_finite = NotFinite(steps[-1].place, total, list(ranks))
        return total, not_finite, skipped if may_skip else None


def _where(
    step: StepOnDevice,
    first: int,
    by_rank: LossColumns,
    loss_ranks: slice,
    rank: int,
) -> NotFinite:
    """On which ranks a step's loss, or else one of its gradients, was not finite.

    Args:
        first: which of the unread steps it is, counted from 1.
    """
    # As in `summary`: a loss counts only on the ranks that have a part of the global one.
    counts = by_rank.gradient > 0
    counts[loss_ranks] = True
    (ranks,) = np.nonzero(counts & (by_rank.first == first))
    by_loss = ranks[by_rank.gradient[ranks] == 0]
    if len(by_loss):
        loss = sum(by_rank.loss_of_first[by_loss].tolist())
        return NotFinite(step.place, loss, by_loss.tolist())
    parameter = ""
    if rank in ranks:
        # Counted from 1.
        gradient = int(by_rank.gradient[rank])
        parameter = step.names[gradient - 1]
    return NotFinite(step.place, None, ranks.tolist(), parameter)
