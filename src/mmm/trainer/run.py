"""One run as a program holds it: its rank, device, log and record, and the rows of its steps (`mmm.trainer.start`)."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmm import history
from mmm.errors import DivergedError, RecordError
from mmm.history.ending import RUNNING, Ending
from mmm.history.record import OWN
from mmm.layout import Layout
from mmm.parallel.local import detached
from mmm.runtime import startup
from mmm.runtime.clock import StepClock
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats, gather_objects, gather_table
from mmm.runtime.ranks import Rank
from mmm.runtime.seed import States
from mmm.runtime.stop import StopSignal
from mmm.trainer.losses import NotFinite, UnreadLosses, on_host, sums_in_order
from mmm.trainer.options import BaseOptions
from mmm.trainer.resume import Origin

if TYPE_CHECKING:
    from mmm.checkpoint.replica import HostMemory
    from mmm.trainer.rates import Utilization

MOST_SKIPPED = 20  # steps in a row; fp16's scaler, which halves with each, begins at 2 ** 16


@dataclasses.dataclass
class Run:
    """What a program holds while it trains.

    Attributes:
        rank, layout, device, precision: of this process.
        clock: for the parts of a step. log: the package's logger.
        outdir: the run's folder; ranks: every rank's host, pid and place: both known on rank 0 only.
        stop: the signal to, if one has come. origin: the checkpoint that it goes on from, if any. identity: of those
            that it can go on from. memory: of the hosts, with --replica.
        unnamed_models: of `mmm.trainer.build`, so far; construction: the generators' states where their constructors
            have stopped.
    """

    options: BaseOptions
    rank: Rank
    layout: Layout
    device: torch.device
    precision: Precision
    clock: StepClock
    log: Any
    outdir: Path | None
    ranks: list[dict[str, Any]]
    record: history.History | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    startup: startup.Times | None = None  # until it is on record
    skip_noted: bool = False  # it has been said that a step was skipped
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    origin: Origin | None = None
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: HostMemory | None = None
    utilization: Utilization | None = None  # on rank 0, where rows say it
    predict: Callable[[], Any] | None = None  # what is predicted for the run, on rank 0, until it is on record
    memory_before: int = 0  # of `mmm.runtime.memory.start_of_peak`, on rank 0
    seconds_per_sample: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=1000))  # of the last rows
    unnamed_models: int = 0
    construction: States | None = None
    _encoded: dict[str, str] = dataclasses.field(default_factory=dict)  # config.json

    def note(self, text: str) -> None:
        """Say what was chosen or done instead of what was expected, once, and keep it in the record."""
        if text in self.notes:
            return
        self.log.info(text, stacklevel=2)
        self.notes.append(text)
        self.describe(notes=self.notes)

    def describe(self, **facts: Any) -> None:
        """Add facts to the record's config.json. Only these are encoded: tables of thousands of ranks are there too."""
        self.config.update(facts)
        if self.outdir is not None:
            self._encoded |= {name: history.encode(value) for name, value in facts.items()}
            ending = self.record.ending if self.record is not None else Ending(RUNNING)
            ended = {name: history.encode(value) for name, value in ending.attrs().items()}
            try:
                history.write_encoded(self.outdir, self._encoded | ended)
            except RecordError as error:
                if ending.state == RUNNING:
                    raise
                self.log.warning("%s", error)  # the run has ended as it has, and its rows are on the disk

    @cached_property
    def losses(self) -> UnreadLosses:
        return UnreadLosses()

    def global_sum(self, local: float | Tensor) -> float:
        """The sum of a number over all data-parallel coordinates. A collective: every rank calls it."""
        (total,) = self.global_sums(detached(local).view(1) if isinstance(local, Tensor) else [local])
        return total

    def global_sums(self, local: list[float] | Tensor) -> list[float]:
        """`global_sum` of several numbers, on the host or, (n,), on the device, at once."""
        by_rank = (
            gather_table(local)
            if isinstance(local, Tensor)
            else torch.tensor(gather_floats(local, self.device), dtype=torch.float64)
        )
        return sums_in_order(on_host(by_rank[self.layout.of_loss_ranks]))

    def step(
        self, step: int, loss: Tensor, *, samples: int, tokens: int = 0, last: bool = False, **more: float
    ) -> float | None:
        """Log and record one optimizer step. A collective: every rank calls it, after the clock's last lap.

        Args:
            step: from 0. last: whether it ends the run, and so is logged whatever ``--log_every`` says.
            loss: this rank's local loss; the local losses add up to the global loss.
            samples, tokens: in the global batch. more: further numbers for the row, which is then logged.

        Returns:
            The global loss; None where no row is due: the host has not waited for it.

        Raises:
            DivergedError: it is not finite, or was not since the last row, or a gradient that the shared loop looks at;
                or too many steps in a row were skipped for it. On every rank.
        """
        due = bool(step % self.options.log_every == 0 or last or more)
        local_loss = {"loss": detached(loss)}
        return self.row({"iter": step}, local_loss, samples=samples, tokens=tokens, more=more, due=due, depth=2)

    def row(
        self,
        at: dict[str, int],
        local_loss: dict[str, Tensor],
        *,
        samples: int,
        tokens: int = 0,
        more: Mapping[str, float | Tensor] | None = None,
        due: bool = True,
        depth: int = 1,
    ) -> float | None:
        """Log and record what has happened since the clock was started. A collective where the row is due: only then
        the host waits for the device.

        Args:
            at: where the run is, such as ``{"iter": 3}``. local_loss: its name, and this rank's, of `detached`.
            samples, tokens: since the clock was started. more: further numbers for the row, tensors the same on all
                ranks.
            due: whether to log, and to find out whether the losses up to here are finite.
            depth: callers between the program and here, so that the log names the program's line.

        Returns, Raises: as `step`.
        """
        self.record_startup()
        ((name, local),) = local_loss.items()
        if not self.losses.by_step:
            self.losses.add(at, local)
        if not due:
            return None
        seconds, numbers = self.clock.seconds(), dict[str, Any](more or {})
        tensors = {key: value for key, value in numbers.items() if isinstance(value, Tensor)}
        timed = {**seconds, OWN: self.clock.own()}
        marks = torch.tensor([*timed.values()], dtype=local.dtype)
        if self.device.type in ("cuda", "xpu"):
            marks = marks.pin_memory()  # else the host waits for the copy
        columns = [self.losses.columns(local), *(value.view(1).to(local) for value in tensors.values())]
        own = torch.cat((*columns, marks.to(local.device, non_blocking=True)))
        by_rank = gather_table(own)
        if self.record is not None:
            table = on_host(by_rank)
            by_rank = torch.from_numpy(table)
        counted = self.layout.of_loss_ranks
        summary = on_host(self.losses.summary(by_rank, counted))
        total, found, skipped = self.losses.read(summary, by_rank, counted, self.rank.rank)
        numbers |= {} if skipped is None else {"skipped": skipped}
        if self.record is not None:
            values, first = table[self.rank.rank].tolist(), len(own) - len(timed)
            numbers |= dict(zip(tensors, values[UnreadLosses.COLUMNS :], strict=False))
            per_rank = {part: table[:, first + i] for i, part in enumerate(timed)}
            if not np.isfinite(per_rank[OWN]).all():
                del per_rank[OWN]
            if samples:
                self.seconds_per_sample.append(seconds["dt"] / samples)
            rate = {"sps": samples / seconds["dt"]} | ({"tps": tokens / seconds["dt"]} if tokens else {})
            rate |= self.utilization.rates(samples, tokens, seconds["dt"]) if self.utilization is not None else {}
            line = self.record.update({**at, name: total, **seconds, **numbers, **rate}, per_rank)
            self.log.info(line, stacklevel=depth + 1)
        if found is not None:
            self._not_finite(found, skipped is not None)
        return total

    def _not_finite(self, found: NotFinite, skipped: bool) -> None:
        """Say where something was not finite, once; end the run if nothing was skipped, or too much. A collective."""
        many = self.losses.in_a_row if self.losses.in_a_row >= MOST_SKIPPED else 0
        if skipped and self.skip_noted and not many:
            return
        text = found.text_on_all(self.rank, [about["host"] for about in self.ranks])
        if skipped and not many:
            self.skip_noted = True
            self.note(f"{text}: all ranks have skipped the step; a row's `skipped` counts such steps")
            return
        after = f"{many} steps in a row were skipped, since the last row because " if many else ""
        advice = f": lower --lr ({self.options.lr})" + (", or try --dtype fp32" if self.precision.mixed else "")
        raise DivergedError(after + text + advice, on_every_rank=True)

    def record_startup(self) -> None:
        """Put every rank's start-up into the record, once, when the first step is over. A collective."""
        if self.startup is None:
            return
        times, self.startup = self.startup, None
        if self.clock.first_start is not None and self.clock.first_end is not None:
            times.model, times.first_step = self.clock.first_start, self.clock.first_end
        if everyone := gather_objects(self.rank, (times.marks(), times.imports)):
            marks, imports = zip(*everyone, strict=True)
            self.describe(startup=startup.as_record(times.source, marks, imports))
        if self.predict is not None:  # the first step did not wait for it
            self.describe(predicted=self.predict())
            self.predict = None
