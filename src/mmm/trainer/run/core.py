"""A run on one rank, from its start to a clean end: device, process group, seed, log, clock, and the rows of its steps.

All else is a `Hook`: a program lists those that it has, in order::

    hooks = [Agreement(), StartUp(), Record()]
    with start_run("fsdp_tp", config, resolved, hooks) as run:
        for step in range(steps):
            run.clock.start()
            ...
            run.step(step, loss, samples=64)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.errors import DeviceError, DivergedError
from mmm.layout import Layout
from mmm.parallel.local import detached
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock, event_class, timed_waits
from mmm.runtime.device import Precision, choose_device, choose_precision, full_float32, left_out
from mmm.runtime.log import get_logger, ignore_views, logging_to, say_once
from mmm.runtime.observer import WatchedRun, observed
from mmm.runtime.process_group import (
    gather_floats,
    gather_table,
    locate,
    process_group,
)
from mmm.runtime.ranks import DRY_RUN, Rank, whoami
from mmm.runtime.seed import seed_start
from mmm.trainer.config.run import BaseOptions, RowOptions, SeededOptions, flags_of, run_options
from mmm.trainer.job import Job
from mmm.trainer.run.rows import NotFinite, Row, UnreadLosses, on_host, sums_in_order

MOST_SKIPPED = 20  # steps in a row; fp16's scaler, which halves with each, begins at 2 ** 16
NO_MPS = "--device mps: {} makes groups by PyTorch's own calls, which MPS has none for; use --device cpu, or one of "
NO_MPS += "mmm.trainer.lm, mmm.trainer.vit and mmm.trainer.cnn"
HookType = TypeVar("HookType", bound="Hook")


class Hook:
    """What goes on around a run. Every rank has the same hooks, in the same order, and calls all methods of each, so
    that they may communicate once the process group is there."""

    def before(self, run: Run) -> None:
        """Before the ranks meet: what is wrong is refused by each rank alone."""

    def meet(self, run: Run, store: dist.Store) -> None:
        """The ranks share a store, and have no process group yet. What is raised here is raised on every rank."""

    def start(self, run: Run) -> None:
        """The process group is up, and the program's own part comes next."""

    def describe(self, run: Run, facts: Mapping[str, Any]) -> None:
        """Something is to be kept with the run. A ``note`` is a sentence that has been logged."""

    def row(self, run: Run, row: Row) -> None:
        """A row is due, before it is logged."""

    def end(self, run: Run, error: BaseException | None) -> None:
        """The program's part is over, or has failed by `error`. What is raised here takes the error's place."""


@dataclass
class Run:
    """What a program holds while it trains.

    Attributes:
        name: of the program, short.
        config: of the program: its flags, those of where it runs (`options`) among them.
        resolved: what was decided before the ranks met.
        rank: this process. device, precision: its own.
        clock: for the parts of a step.
        hooks: in order.
        outdir: the run's folder, on rank 0, where a hook has made one.
    """

    name: str
    config: Any
    resolved: Job
    rank: Rank
    device: torch.device
    precision: Precision
    clock: StepClock
    hooks: list[Hook]
    outdir: Path | None = None

    @cached_property
    def options(self) -> BaseOptions:
        """The flags of where the run is, and what it leaves."""
        return run_options(self.config)

    @property
    def layout(self) -> Layout:
        """Fitted to the number of ranks."""
        return self.resolved.layout

    @property
    def training_spec(self) -> Job | None:
        """What was decided; None of a program that has no model of the package's."""
        return None if self.resolved.model is None else self.resolved

    @property
    def seed(self) -> int:
        """0 of a program that has no --seed."""
        return self.options.seed if isinstance(self.options, SeededOptions) else 0

    @property
    def log_every(self) -> int:
        """Steps between two logged rows; 1 of a program that has no --log_every."""
        return self.options.log_every if isinstance(self.options, RowOptions) else 1

    @property
    def dry(self) -> bool:
        """Whether this is a dry run, whose tensors have no elements."""
        return self.rank.source == DRY_RUN

    @property
    def log(self) -> Logger:
        return get_logger()

    @cached_property
    def losses(self) -> UnreadLosses:
        return UnreadLosses()

    def hook(self, kind: type[HookType]) -> HookType | None:
        """The run's hook of a kind, if it has one."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    def note(self, text: str) -> None:
        """Say what was chosen or done instead of what was expected, once, and keep it."""
        if say_once(text, stacklevel=3):
            self.describe(note=text)

    def describe(self, **facts: Any) -> None:
        """Keep facts of the run: by the record, in its config.json."""
        for hook in self.hooks:
            hook.describe(self, facts)

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
        return sums_in_order(on_host(by_rank[self.layout.loss_rank_slice]))

    def step(
        self, step: int, loss: Tensor, *, samples: int, tokens: int = 0, last: bool = False, **more: float
    ) -> float | None:
        """Log and record one optimizer step. A collective: every rank calls it, after the clock's last lap.

        Args:
            step: from 0.
            loss: this rank's local loss; the local losses add up to the global loss.
            samples: in the global batch.
            tokens: likewise.
            last: whether it ends the run, and so is logged whatever ``--log_every`` says.
            more: further numbers for the row, which is then logged.

        Returns:
            The global loss; None where no row is due: the host has not waited for it.

        Raises:
            DivergedError: it is not finite, or was not since the last row, or a gradient that the shared loop looks at;
                or too many steps in a row were skipped for it; or ranks have called other FSDP units. On every rank.
        """
        due = bool(step % self.log_every == 0 or last or more)
        local_loss = {"loss": detached(loss)}
        row = self.row({"iter": step}, local_loss, samples=samples, tokens=tokens, more=more, due=due, depth=2)
        return None if row is None else row.loss

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
    ) -> Row | None:
        """Log and record what has happened since the clock was started. A collective where the row is due: only then
        the host waits for the device. Its seconds and rates are the means of the steps since the last row that was due.

        Args:
            at: where the run is, such as ``{"iter": 3}``.
            local_loss: its name, and this rank's, of `detached`.
            samples: since the clock was started.
            tokens: likewise.
            more: further numbers for the row, tensors the same on all ranks.
            due: whether to log, and to find out whether the losses up to here are finite.
            depth: callers between the program and here, so that the log names the program's line.

        Raises:
            DivergedError: as `step`.
        """
        ((name, local),) = local_loss.items()
        if not self.losses.by_step:
            self.losses.add(at, local)
        if not due:
            return None
        numbers: dict[str, Any] = dict(more or {})
        tensors = {key: value for key, value in numbers.items() if isinstance(value, Tensor)}
        timed = self.clock.read()
        by_rank = self._gather_row(local, tensors, timed)
        table = None if self.outdir is None else on_host(by_rank)  # the other ranks' hosts do not wait for the device
        if table is not None:
            by_rank = torch.from_numpy(table)
        loss_ranks = self.layout.loss_rank_slice
        summary = on_host(self.losses.summary(by_rank, loss_ranks))
        total, not_finite, skipped = self.losses.read(summary, by_rank, loss_ranks, self.rank.rank)
        row = Row(at, total, samples, tokens)
        if table is not None:
            numbers |= dict(zip(tensors, table[self.rank.rank].tolist()[UnreadLosses.COLUMNS :], strict=False))
            numbers |= {} if skipped is None else {"skipped": skipped}
            row.fill(
                name, timed, numbers, dict(zip(timed, table.T[UnreadLosses.COLUMNS + len(tensors) :], strict=True))
            )
        for hook in self.hooks:
            hook.row(self, row)
        if row.line:
            self.log.info(row.line, stacklevel=depth + 1)
        if not_finite is not None:
            self._not_finite(not_finite, skipped is not None)
        return row

    def _gather_row(self, local: Tensor, tensors: Mapping[str, Tensor], timed: Mapping[str, float]) -> Tensor:
        """What a row needs of every rank, (ranks, columns): `UnreadLosses.columns`, `tensors`, `timed`. A collective,
        after which the host has not waited for the device."""
        seconds = torch.tensor([*timed.values()], dtype=local.dtype)
        if self.device.type in ("cuda", "xpu"):
            seconds = seconds.pin_memory()  # else the host waits for the copy
        columns = [self.losses.columns(local), *(value.view(1).to(local) for value in tensors.values())]
        return gather_table(torch.cat((*columns, seconds.to(local.device, non_blocking=True))))

    def _not_finite(self, where: NotFinite, skipped: bool) -> None:
        """Say where something was not finite, once; end the run if nothing was skipped, or too much. A collective."""
        many = self.losses.in_a_row if self.losses.in_a_row >= MOST_SKIPPED else 0
        if skipped and self.losses.skip_noted and not many:
            return
        text = where.text_on_all(self.rank)
        if skipped and not many:
            self.losses.skip_noted = True
            self.note(f"{text}: all ranks have skipped the step; a row's `skipped` counts such steps")
            return
        after = f"{many} steps in a row were skipped, since the last row because " if many else ""
        rate = flags_of(self.config).get("lr")
        advice = ": lower the learning rate" if rate is None else f": lower --lr ({rate})"
        advice += ", or try --dtype fp32" if self.precision.mixed else ""
        raise DivergedError(after + text + advice, on_every_rank=True)


@contextmanager
def start_run(
    name: str, config: Any, resolved: Job | Layout, hooks: Sequence[Hook], *, runs_on_mps: bool = False
) -> Iterator[Run]:
    """A run, for the length of a ``with`` block: everything up before it, every hook's end after it.

    Everything that can be refused without the other ranks is refused before they meet.

    Args:
        name: of the program, for its folder and its messages.
        config: a `BaseOptions`, or has one as its group ``run``.
        resolved: what was decided before the ranks meet, or the layout alone, fitted to their number.
        hooks: in the order in which they are called.
        runs_on_mps: whether one rank on MPS can run it.

    Raises:
        UserError: as hooks do; and DeviceError where MPS cannot run the program.
    """
    options = run_options(config)
    rank = locate(whoami(), options.timeout)
    device = choose_device(options.device, rank)
    if device.type == "mps" and not runs_on_mps:
        raise DeviceError(NO_MPS.format(name))
    precision = choose_precision(options.dtype if isinstance(options, SeededOptions) else "auto", device)
    spec = Job(layout=resolved) if isinstance(resolved, Layout) else resolved
    clock = StepClock(device, PARTS if spec.layout.pp == 1 else PIPELINE_PARTS)
    run = Run(name, config, spec, rank, device, precision, clock, [*hooks])
    for hook in run.hooks:
        hook.before(run)

    def meet(store: dist.Store) -> None:
        for hook in run.hooks:
            hook.meet(run, store)

    seed_start(run.seed, run.layout.dp_coordinate(rank.rank))
    group = process_group(rank, device, options.timeout, meet)
    with (
        observed(WatchedRun(group, clock, run.layout, precision, spec)),
        full_float32(precision),
        ignore_views(),
        ExitStack() as stack,
    ):
        compiled = spec.techniques.compile  # its code waits in C++
        if not (run.dry or event_class(device) or compiled):
            stack.enter_context(timed_waits(clock))
        file = None if run.outdir is None else run.outdir / "log.txt"
        stack.enter_context(logging_to(1 if run.dry else rank.rank, file, options.log_all_ranks))
        error: BaseException | None = None
        try:
            if note := left_out(options.device, device):
                run.note(note)
            for hook in run.hooks:
                hook.start(run)
            yield run
        except BaseException as raised:
            error = raised
        leaving = _end(run, error)
    if leaving is not None:
        raise leaving


def _end(run: Run, error: BaseException | None) -> SystemExit | None:
    """Every hook's end. Returns what a hook ends a run by that went well, on every rank: the group then ends as well.

    Raises:
        BaseException: `error`, or what a hook has put in its place.
    """
    leaving: SystemExit | None = None
    for hook in run.hooks:
        try:
            hook.end(run, error)
        except BaseException as raised:
            if error is None and isinstance(raised, SystemExit):
                leaving = raised
            else:
                error = raised
    if error is not None:
        raise error
    return leaving
