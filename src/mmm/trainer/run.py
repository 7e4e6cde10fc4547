"""One run on one rank: device, process group, log, and on rank 0 the record, from start to a clean end.

::

    with start_run("fsdp_tp", config, layout) as run:
        ...
        for step in range(steps):
            ...
            run.step(step, loss)
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmm import history
from mmm.analysis.footprint import Footprint, check_fits
from mmm.contract import LINE_VARIABLE, SITE_VARIABLE
from mmm.errors import DeviceError, DivergedError
from mmm.history.attempts import this_attempt
from mmm.history.ending import RUNNING, Ending
from mmm.history.trackers import Tracked
from mmm.parallel.data.fsdp import ignore_views
from mmm.parallel.loss import detached
from mmm.parallel.mesh import Layout
from mmm.plan.observer import observed
from mmm.runtime import startup
from mmm.runtime.agreement import agree
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock
from mmm.runtime.device import Precision, choose_device, choose_precision, full_float32, left_out
from mmm.runtime.hang import HangWatch
from mmm.runtime.log import logging_to
from mmm.runtime.process_group import gather_floats, gather_objects, gather_table, locate, process_group
from mmm.runtime.ranks import DRY_RUN, Rank, command_line, whoami
from mmm.runtime.stop import StopSignal, stop_signal
from mmm.trainer import resume
from mmm.trainer.facts import ADVICE, all_ranks, facts_of_run
from mmm.trainer.losses import NotFinite, UnreadLosses, on_host, sums_in_order
from mmm.trainer.options import BaseOptions
from mmm.trainer.report import rank_table, report_end
from mmm.trainer.resolve import Resolved
from mmm.trainer.resume import Origin, RunFolder

if TYPE_CHECKING:
    from mmm.trainer.rates import Utilization

BROKEN_EXIT = 1  # of a run with --break, whatever it found
MOST_SKIPPED = 20  # steps in a row; fp16's scaler, which halves with each, begins at 2 ** 16


@dataclasses.dataclass
class Run:
    """What a program holds while it trains.

    Attributes:
        rank, layout, device, precision: of this process.
        clock: for the parts of a step. log: the package's logger.
        outdir: the run's folder; ranks: every rank's host, pid and place: both known on rank 0 only.
        stop: the signal to, if one has come. origin: the checkpoint that it goes on from, if any. identity: of those
            that it can go on from.
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
    utilization: Utilization | None = None  # on rank 0, where rows say it
    _encoded: dict[str, str] = dataclasses.field(default_factory=dict)  # config.json

    def note(self, text: str) -> None:
        """Say what was chosen or done instead of what was expected, and keep it in the record."""
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
            history.write_encoded(self.outdir, self._encoded | ended)

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
        marks = torch.tensor([*seconds.values()], dtype=local.dtype)
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
            values, first = table[self.rank.rank].tolist(), len(own) - len(seconds)
            numbers |= dict(zip(tensors, values[UnreadLosses.COLUMNS :], strict=False))
            per_rank = {part: table[:, first + i] for i, part in enumerate(seconds)}
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


@contextmanager
def start_run(
    module: str,
    options: BaseOptions,
    resolved: Resolved | Layout,
    data: Mapping[str, Any] | None = None,
    footprint: Footprint | None = None,
) -> Iterator[Run]:
    """A run, for the length of a ``with`` block: everything up before it, the record complete and on disk after it.

    Everything that can be refused without the other ranks is refused before they meet; then the ranks compare what has
    to be equal on all of them (`mmm.trainer.facts`), and rank 0 prepares the run's folder, before any process group.

    Args:
        module: short name, for the log and the default folder.
        resolved: what has been decided; or, of a program that has no model, the layout, fitted to the number of ranks,
            and beside it data and footprint.
        data: what the record keeps of the data, None for a program that reads none. Its name (``dataset``) and hash
            (``sha256``) have to be equal on all ranks; what it has to tell the user (``note``) is logged.
        footprint: what the ranks will hold; None for next to nothing.

    Raises:
        ConfigError: it cannot fit into the memory here; or the ranks differ, and then on every rank.
        RecordError: the folder cannot be prepared; on every rank.
        SystemExit: with ``--break``, once the run has ended and its record is complete.
    """
    rank = locate(whoami(), options.timeout)
    device = choose_device(options.device, rank)
    if device.type == "mps" and not options.RUNS_ON_MPS:
        raise DeviceError(
            f"--device mps: {module} makes groups by PyTorch's own calls, which MPS has none for; use --device cpu, or "
            f"one of mmm.trainer.lm, mmm.trainer.vit and mmm.trainer.fsdp"
        )
    precision = choose_precision(options.dtype, device)
    layout = resolved.layout if isinstance(resolved, Resolved) else resolved
    if isinstance(resolved, Resolved):
        data, footprint = resolved.data.describe(), resolved.footprint
    dry = rank.source == DRY_RUN
    if footprint is not None and not dry:
        check_fits(footprint, layout, rank, device, precision)
    facts = facts_of_run(module, options, layout, device, precision, data, rank)
    prepared: list[RunFolder] = []

    def meet(store: dist.Store) -> None:
        agree(store, rank, facts, ADVICE, lambda: prepared.append(resume.prepare(module, options, this_attempt())))

    torch.manual_seed(options.seed)
    times = startup.ready()
    clock = StepClock(device, PARTS if layout.pp == 1 else PIPELINE_PARTS)
    group = observed(process_group(rank, device, options.timeout, meet), clock, layout, precision, resolved)
    watch: Any = nullcontext() if dry else HangWatch(rank, options.timeout, clock)
    with group, watch, ExitStack() as stack:
        stack.enter_context(full_float32(precision))
        stack.enter_context(ignore_views())
        outdir = prepared[0].outdir if prepared else None  # on rank 0
        speaker, file = 1 if dry else rank.rank, outdir / "log.txt" if outdir else None
        log = stack.enter_context(logging_to(speaker, file, options.log_all_ranks))
        ranks = all_ranks(rank, device, layout)
        times.group = time.time()
        config: dict[str, Any] = {
            "module": module,
            "command": command_line(),
            "options": dataclasses.asdict(options),
            "layout": str(layout),
            "mesh": layout.sizes,
            "precision": {"name": precision.name, "reason": precision.reason},
            "started_by": rank.source,
            "launch": os.environ.get(LINE_VARIABLE),
            "site": json.loads(os.environ.get(SITE_VARIABLE, "null")),
            "attempt": attempt._asdict() if (attempt := this_attempt()) else None,
            "python": sys.executable,
            "versions": history.versions(),
            "hosts": sorted({about["host"] for about in ranks}),
            "ranks": ranks,
            "notes": [],
        }
        if data is not None:
            config["data"] = data
        wish = stack.enter_context(stop_signal()) if options.checkpoint_every is not None else StopSignal()
        run = Run(options, rank, layout, device, precision, clock, log, outdir, ranks, startup=times, stop=wish)
        run.describe(**config)
        log.info(
            "%d ranks (%s), layout %s, %s, %s (%s)\n%s",
            rank.world_size,
            rank.source,
            layout,
            device.type,
            precision.name,
            precision.reason,
            rank_table(ranks) if ranks else "(rank 0 has the table)",
        )
        for note in filter(None, (left_out(options.device, device), prepared[0].note if prepared else "")):
            run.note(note)
        if data is not None and data.get("note"):  # another data set stands in for the one asked for, say
            run.note(data["note"])
        if isinstance(resolved, Resolved):
            if rank.is_main or options.log_all_ranks:
                log.info("model:\n%s", resolved.summary())
            run.describe(**resolved.describe())
            for note in resolved.notes:
                run.note(note)
            resume.choose(run, prepared[0] if prepared else None, module, resolved)
        if outdir is None:
            with watch:
                yield run
                run.record_startup()  # of a program that has no steps
        else:
            goes_on = resume.record_goes_on(prepared[0], run.origin, str(layout))
            tracked = Tracked(options.tracker, outdir, {"command": command_line(), "layout": str(layout)})
            record = history.History(
                outdir, ranks=ranks, flush_every=options.flush_every, resume=goes_on, tracker=tracked
            )
            with record as run.record, watch:
                yield run
                run.record_startup()
            if len(run.record):
                report_end(run, outdir)
    if options.break_ is not None:  # on every rank
        raise SystemExit(BROKEN_EXIT)
