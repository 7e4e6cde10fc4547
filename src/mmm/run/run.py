"""A run on one rank: device, process group, seed, log, clock; and the one loop that every program has.

::

    with start_run("lm", config, job, hooks) as run:
        model, optimizer = …
        # What a checkpoint has. Where the run goes on, it is loaded here.
        run.state(model=model, optimizer=optimizer)
        for step in run.steps(batches, job.steps, samples=job.global_batch_size):
            loss = …
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

The body of the loop is the program's own. Around it, the run fetches, seeds, times, logs and records. All else is a
`mmm.run.hook.Hook`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.data.workers import read
from mmm.errors import DataError, DeviceError, DivergedError
from mmm.layout import Layout
from mmm.optim.adamw import learning_rate, update_shards
from mmm.parallel.local import detached
from mmm.run.comm import TorchComm, current_comm
from mmm.run.hook import Hook
from mmm.run.rows import NotFinite, Row, RowSoFar, UnreadSteps, on_host, sums_in_order
from mmm.run.step import Step
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock, event_class, timed_waits
from mmm.runtime.device import Precision, choose_device, choose_precision, full_float32, left_out
from mmm.runtime.log import get_logger, ignore_views, logging_to, say_once
from mmm.runtime.ranks import Rank, whoami
from mmm.runtime.seed import seed_start, seed_step
from mmm.units import counted

MOST_SKIPPED = 20  # steps in a row; fp16's scaler, which halves with each, begins at 2 ** 16
NO_MPS = (
    "--device mps: {} makes groups by PyTorch's own calls, which MPS has none for; use --device cpu, or one of "
    "mmm.trainer.lm, mmm.trainer.vit and mmm.trainer.cnn"
)
Batches = Any  # an iterable, or an object with ``from_step``


def _nothing(folder: Path) -> None:
    """Of a run without checkpoints."""


def _no_lines(folder: Path, done: int) -> list[str]:
    """Of a run without checkpoints."""
    return []


def _whole(batch: Any) -> Iterator[Any]:
    """A batch as its only micro-batch."""
    yield batch


@dataclass
class Run:
    """What a program holds while it trains.

    Attributes:
        name: of the program, short.
        config: of the program: its flags.
        options: those of its flags that say where it runs, for how long, and what it leaves: the group ``run``.
        job: what was decided before the ranks met. None of a program that has no model of the package's.
        rank: this process.
        layout: fitted to the number of ranks.
        device: of this rank.
        precision: its data types.
        comm: how the ranks talk outside of the model.
        clock: for the parts of a step.
        hooks: in order.
        exits: closed when every hook has ended.
        objects: of `state`, by their names.
        first: the step that the run begins with: 0 unless it goes on from a checkpoint.
        split: a batch → its micro-batches.
        outdir: the run's folder, on rank 0, where a hook has made one.
        keeps_record: the rows that are in the folder go on.
        resume: how they go on, once that is known.
        origin: the checkpoint that the run goes on from.
        saves: whether checkpoints are saved.
        samples: number of samples in the global batch of the loop under way.
        total: number of steps of that loop.
        history: the record's rows, on rank 0, where a hook keeps them.
        prepare_folder: what is done in the run's folder before the run begins, on rank 0.
        closing_lines: lines that end the log: what is in the run's folder, after so many steps or epochs.
        facts: what hooks and the program have described.
        unread: the steps since the last row that was due.
        so_far: the row under way.
        unnamed_models: number of models that `mmm.run.build` has made without a name.
        constructor_states: of the random generators where the constructors of those have stopped.
    """

    name: str
    config: Any
    options: Any
    job: Any
    rank: Rank
    layout: Layout
    device: torch.device
    precision: Precision
    comm: TorchComm
    clock: StepClock
    hooks: list[Hook]
    exits: ExitStack = field(default_factory=ExitStack)
    objects: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    split: Callable[[Any], Iterable[Any]] = _whole
    outdir: Path | None = None
    keeps_record: bool = False
    resume: Any = None
    origin: Any = None
    saves: bool = False
    samples: int = 0
    total: int = 0
    history: Any = None
    prepare_folder: Callable[[Path], object] = _nothing
    closing_lines: Callable[[Path, int], list[str]] = _no_lines
    facts: dict[str, Any] = field(default_factory=lambda: {"notes": []})
    unread: UnreadSteps = field(default_factory=UnreadSteps)
    so_far: RowSoFar = field(default_factory=RowSoFar)
    unnamed_models: int = 0
    constructor_states: Any = None
    _rate: float | None = None

    @property
    def seed(self) -> int:
        seed: int = self.options.seed
        return seed

    @property
    def log(self) -> Logger:
        return get_logger()

    def note(self, text: str) -> None:
        """Say what was chosen or done instead of what was expected, once, and keep it."""
        if say_once(text, stacklevel=3):
            self.describe(note=text)

    def describe(self, **facts: Any) -> None:
        """Keep facts of the run: the record writes them to its config.json."""
        if "note" in facts:
            self.facts["notes"].append(facts.pop("note"))
            facts["notes"] = self.facts["notes"]
        self.facts.update(facts)
        for hook in self.hooks:
            hook.describe(self, facts)

    def add_row(self, numbers: Mapping[str, float]) -> None:
        """Record a row that no step has made, such as a line of a table. On rank 0; others do nothing."""
        if self.history is not None:
            self.history.update(numbers)

    def state(self, **objects: Any) -> None:
        """Name every object that training changes. Checkpoints save them; on resume they are loaded here. A collective.

        Functions of seed and step need not be saved: batches, random numbers, and a learning rate that the program
        computes from the step, as the trainers do.

        Args:
            objects: models, optimizers, and anything with ``state_dict`` and ``load_state_dict`` that is the same on
                all ranks, or has DTensors: schedulers of the learning rate, `mmm.parallel.EMA`, a GradScaler.

        Raises:
            ConfigError: one of them cannot be saved.
            CheckpointError: the checkpoint is of other objects, or no step is left.
        """
        self.objects = objects
        for optimizer in self._optimizers():
            update_shards(optimizer)
            optimizer.register_step_pre_hook(self._before_update)
        for hook in self.hooks:
            hook.state(self)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [value for value in self.objects.values() if isinstance(value, torch.optim.Optimizer)]

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in self._optimizers()[:1]:
            self._rate = learning_rate(optimizer)
        if self.clock.optimizer_ends_backward:
            self.clock.lap("dtb")

    def steps(
        self,
        batches: Batches,
        steps: int,
        *,
        samples: int,
        tokens: int = 0,
        eval_every: int | None = None,
        epoch: int | None = None,
        place: Mapping[str, int] | None = None,
    ) -> Iterator[Step]:
        """The steps that are left, each fetched, seeded, timed, logged and recorded around its body.

        Args:
            batches: this rank's, one a step: an iterable, or an object whose ``from_step(first)`` is an iterable that
                begins there. Of an iterable, the batches of the steps that are done are read, and passed over.
            steps: of the whole run.
            samples: number of samples in the global batch.
            tokens: number of tokens in it; 0 if samples are not text.
            eval_every: steps between two evaluations, one more at the end. 0: at the end alone. None: there are none.
            epoch: steps of an epoch. A row is then an epoch's, with the mean of its losses, ``train_loss``.
            place: what a row says besides its step, such as ``{"stage": 1}``.

        Raises:
            ConfigError: the body has not called `Step.log`.
            DataError: there are fewer batches than steps; a data loader's worker has failed.
            DivergedError: a loss that is not finite, or a gradient that the body has checked; or too many steps in a
                row were skipped. On every rank.
        """
        # Ranks that share samples draw the same random numbers. Stages of a pipeline are other layers, and draw others;
        # but not while they fetch: a loader that shuffles has to give all of them the same samples.
        coordinate = self.layout.dp_coordinate(self.rank.rank)
        stage = self.layout.coordinates(self.rank.rank)["pp"]
        coordinate_and_stage = coordinate * self.layout.pp + stage
        self.samples = samples
        self.total = steps
        for hook in self.hooks:
            hook.loop(self)
        if self.first > 0 and self.first == steps:  # the run was interrupted after its last step
            self.note("no step is left to make")
        source = self._from_first(batches, coordinate)
        begins_row = True
        for number in range(self.first, steps):
            if begins_row or epoch is None:
                self.clock.start()
            step = self._plan_step(number, steps, eval_every, epoch, place or {})
            self.clock.step = number
            self._rate = None
            seed_step(self.seed, number, coordinate)
            for hook in self.hooks:
                hook.begin(self, step)
            step.batch = next(source, None)
            if step.batch is None:
                raise DataError(
                    f"the data ended after {counted(number, 'batch', 'batches')}, and {steps} steps take one each"
                )
            count = getattr(step.batch, "count", None)
            step.count = count if isinstance(count, int | Tensor) else None  # a list has a method of that name
            if self.layout.pp > 1:
                seed_step(self.seed, number, coordinate_and_stage)
            self.clock.lap("dtd")
            self.clock.optimizer_ends_backward = self.layout.pp == 1
            yield step
            self.clock.optimizer_ends_backward = False
            self.clock.end_step()
            if isinstance(step.count, Tensor):
                self.unread.add_count(number, step.count)
            self.so_far.add(step.local_loss, None if epoch is None else step.skip)
            if step.ends_row:
                self._end_row(step, "loss" if epoch is None else "train_loss", samples, tokens)
            begins_row = step.ends_row
            for hook in self.hooks:
                hook.finish(self, step)
            if step.saves and not begins_row:
                self.clock.end_step()
            if step.last:
                break
        self.first = 0  # of a further loop of the same run

    def _plan_step(
        self, number: int, steps: int, eval_every: int | None, epoch: int | None, place: Mapping[str, int]
    ) -> Step:
        """A step, with what its program's flags say of it."""
        last = number == steps - 1
        step = Step(self, number, last=last)
        if epoch is not None:
            step.place = {**place, "epoch": number // epoch + 1}
            step.ends_row = last or (number + 1) % epoch == 0
            step.due = step.ends_row
            step.evaluates = step.ends_row and eval_every is not None
            return step
        step.place = {**place, "iter": number}
        if eval_every is not None:
            step.evaluates = last or (eval_every > 0 and (number + 1) % eval_every == 0)
        log_every = self.options.log_every
        step.due = last or step.evaluates or number % log_every == 0
        return step

    def _from_first(self, batches: Batches, coordinate: int) -> Iterator[Any]:
        """The batches from the first step on."""
        if hasattr(batches, "from_step"):
            return iter(batches.from_step(self.first))
        source = self.read(batches)
        began = time.perf_counter()
        for number in range(self.first):
            seed_step(self.seed, number, coordinate)
            if next(source, None) is None:
                read_so_far = counted(number, "batch", "batches")
                raise DataError(
                    f"the data ended after {read_so_far}, and {self.first} steps that are done took one each"
                )
        if self.first:
            seconds = time.perf_counter() - began
            self.log.info("the batches of the %d steps that are done were read again in %.1f s", self.first, seconds)
        return source

    def read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an iterable, such as a `DataLoader`, on the device.

        Raises:
            DataError: a data loader's worker has failed.
        """
        return map(self.on_device, read(batches, self.options.timeout))

    def _end_row(self, step: Step, loss_name: str, samples: int, tokens: int) -> None:
        """Log and record the row that this step ends, if it is due. A collective."""
        steps = self.so_far.steps
        if step.due:
            self._refuse_empty_batches()
            rate = self._learning_rate()
            numbers: dict[str, float | Tensor] = {} if rate is None else {"lr": rate}
            numbers |= step.row
            row_loss = self.so_far.mean()
            self.row(step.place, {loss_name: row_loss}, samples=samples * steps, tokens=tokens * steps, numbers=numbers)
        else:
            self.unread.add_row(step.place, self.so_far.mean())
        self.so_far = RowSoFar()

    def _learning_rate(self) -> float | None:
        """Of the first optimizer: at its last update in this step, or as it is now where there was none."""
        if self._rate is not None:
            return self._rate
        optimizers = self._optimizers()
        return learning_rate(optimizers[0]) if optimizers else None

    def _refuse_empty_batches(self) -> None:
        if self.comm.dry:  # whose counts have no value
            return
        empty = self.unread.step_without_targets()
        if empty is not None:
            raise DataError(
                f"no token in the global batch of step {empty} has a target: each is the last of its document, or "
                f"padding; use a larger batch, or longer documents",
                on_every_rank=True,
            )

    def row(
        self,
        place: Mapping[str, int],
        local_loss: Mapping[str, Tensor],
        *,
        samples: int,
        tokens: int = 0,
        numbers: Mapping[str, float | Tensor] | None = None,
    ) -> Row:
        """Log and record what has happened since the last row. A collective, and the host waits for the device.

        Seconds and rates are the means over the steps since then.

        Args:
            place: where the run is, such as ``{"iter": 3}``.
            local_loss: its name, and this rank's loss, detached from the graph.
            samples: number of samples since the clock was started.
            tokens: number of tokens in them.
            numbers: further ones of the row; tensors are the same on all ranks.

        Raises:
            DivergedError: as `steps`.
        """
        ((loss_name, local),) = local_loss.items()
        self.unread.add_row(place, local)
        numbers = dict(numbers or {})
        tensors = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
        seconds = self.clock.read()
        by_rank = self._gather_row(local, tensors, seconds)
        # Rank 0 writes the row, and so waits for the device here. The others wait below, for a few numbers.
        table = None if self.outdir is None else on_host(by_rank)
        if table is not None:
            by_rank = torch.from_numpy(table)
        loss_ranks = self.layout.loss_rank_slice
        summary = on_host(self.unread.summary(by_rank, loss_ranks))
        total, not_finite, skipped = self.unread.read(summary, by_rank, loss_ranks, self.rank.rank)
        row = Row(place, total, samples, tokens)
        if table is not None:
            first_number = UnreadSteps.COLUMNS
            first_second = first_number + len(tensors)
            numbers |= dict(zip(tensors, table[self.rank.rank, first_number:].tolist(), strict=False))
            if skipped is not None:
                numbers["skipped"] = skipped
            per_rank = dict(zip(seconds, table.T[first_second:], strict=True))
            row.fill(loss_name, seconds, numbers, per_rank)
        for hook in self.hooks:
            hook.row(self, row)
        if row.line:
            self.log.info(row.line, stacklevel=_depth_of_program())
        if not_finite is not None:
            self._not_finite(not_finite, may_skip=skipped is not None)
        return row

    def _gather_row(self, local: Tensor, tensors: Mapping[str, Tensor], seconds: Mapping[str, float]) -> Tensor:
        """What a row needs of every rank. A collective, after which the host has not waited for the device.

        Returns:
            (ranks, columns): of `UnreadSteps.columns`, `tensors` and `seconds`.
        """
        from_host = torch.tensor([*seconds.values()], dtype=local.dtype)
        if self.device.type in ("cuda", "xpu"):
            from_host = from_host.pin_memory()  # else the host waits for the copy
        columns = [self.unread.columns(local), *(value.view(1).to(local) for value in tensors.values())]
        return self.comm.table(torch.cat((*columns, from_host.to(local.device, non_blocking=True))))

    def _not_finite(self, where: NotFinite, may_skip: bool) -> None:
        """Say where something was not finite, once. End the run if nothing was skipped, or too much. A collective."""
        unread = self.unread
        too_many = unread.skipped_in_a_row >= MOST_SKIPPED
        goes_on = may_skip and not too_many
        if goes_on and unread.has_said_skip:
            return
        text = where.text_on_all(self.comm)
        if goes_on:
            unread.has_said_skip = True
            self.note(f"{text}: all ranks have skipped the step; a row's `skipped` counts such steps")
            return
        if too_many:
            text = f"{unread.skipped_in_a_row} steps in a row were skipped, since the last row because {text}"
        rate = learning_rate_flag(self.config)
        advice = "lower the learning rate" if rate is None else f"lower --lr ({rate})"
        if self.precision.mixed:
            advice += ", or try --dtype fp32"
        raise DivergedError(f"{text}: {advice}", on_every_rank=True)

    @contextmanager
    def evaluating(self, *models: Any) -> Iterator[None]:
        """Inside, models are in evaluation mode, nothing has a gradient, and the time counts for no step."""
        self.clock.pause()
        for model in models:
            model.train(False)
        with torch.no_grad():
            yield
        for model in models:
            model.train(True)
        self.clock.resume()

    def mean_loss(self, local_losses: Iterable[Tensor]) -> float:
        """The mean over global batches of the loss. A collective.

        Args:
            local_losses: of each global batch, this rank's part of the loss.

        Raises:
            DataError: there is none.
        """
        losses = [detached(loss) for loss in local_losses]
        if not losses:
            raise DataError(
                "there is no batch to evaluate on: the data held out are fewer than a batch, or the iterator over them "
                "has been used up; give it a loader that begins anew each time"
            )
        return self.global_sum(sum(losses[1:], losses[0])) / len(losses)

    def global_sum(self, local: float | Tensor) -> float:
        """The sum of a number over all data-parallel coordinates. A collective: every rank calls it."""
        own = detached(local).view(1) if isinstance(local, Tensor) else [local]
        (total,) = self.global_sums(own)
        return total

    def global_sums(self, local: list[float] | Tensor) -> list[float]:
        """`global_sum` of several numbers, on the host or, (n,), on the device, at once."""
        if isinstance(local, Tensor):
            by_rank = self.comm.table(local)
        else:
            by_rank = self.comm.floats(local, self.device)
        return sums_in_order(on_host(by_rank[self.layout.loss_rank_slice]))

    def on_device(self, batch: Any) -> Any:
        """A tensor, or those in a list, tuple or dict, on the device; floats in the dtype of the weights."""
        if isinstance(batch, Tensor):
            return batch.to(self.device, self.precision.storage if batch.is_floating_point() else None)
        if isinstance(batch, dict):
            return {name: self.on_device(value) for name, value in batch.items()}
        if isinstance(batch, list | tuple):
            return [self.on_device(value) for value in batch]
        return batch


def _depth_of_program() -> int:
    """How many callers up the program's loop is: the log's line names it, and not the run or what examples share."""
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent.name in ("run", "_support"):
        frame = frame.f_back
        depth += 1
    return depth


def learning_rate_flag(config: Any) -> float | None:
    """The flag --lr of a program, whatever group has it; None where it has none."""
    groups = [config, *vars(config).values()] if config is not None else []
    return next((group.lr for group in groups if isinstance(getattr(group, "lr", None), float)), None)


@contextmanager
def start_run(name: str, config: Any, job: Any, hooks: Sequence[Hook], *, runs_on_mps: bool = False) -> Iterator[Run]:
    """A run, for the length of a ``with`` block: everything up before it, every hook's end after it.

    Everything that can be refused without the other ranks is refused before they meet.

    Args:
        name: of the program, for its folder and its messages.
        config: the program's flags. Its group ``run``, or the config itself, says where it runs.
        job: what was decided before the ranks meet; or the layout alone, fitted to their number.
        hooks: in the order in which they are called.
        runs_on_mps: whether one rank on MPS can run it.

    Raises:
        UserError: as hooks do; and DeviceError where MPS cannot run the program.
    """
    options = getattr(config, "run", config)
    comm = current_comm()
    rank = comm.locate(whoami(), options.timeout)
    device = choose_device(options.device, rank)
    if device.type == "mps" and not runs_on_mps:
        raise DeviceError(NO_MPS.format(name))
    precision = choose_precision(options.dtype, device)
    has_layout_alone = isinstance(job, Layout)
    layout = job if has_layout_alone else job.layout
    clock = StepClock(device, PARTS if layout.pp == 1 else PIPELINE_PARTS)
    job = None if has_layout_alone else job
    run = Run(name, config, options, job, rank, layout, device, precision, comm, clock, [*hooks])
    for hook in run.hooks:
        hook.before(run)

    def meet(store: dist.Store) -> None:
        for hook in run.hooks:
            hook.meet(run, store)

    seed_start(run.seed, layout.dp_coordinate(rank.rank))
    with comm.group(run, meet), full_float32(precision), ignore_views(), ExitStack() as stack:
        techniques = getattr(job, "techniques", None)
        is_compiled = techniques is not None and techniques.compile  # its code waits in C++
        if not (comm.dry or event_class(device) or is_compiled):
            stack.enter_context(timed_waits(clock))
        log_file = None if run.outdir is None else run.outdir / "log.txt"
        # A dry run says nothing itself: it logs as any rank but the first.
        log_rank = 1 if comm.dry else rank.rank
        stack.enter_context(logging_to(log_rank, log_file, options.log_all_ranks, options.verbose))
        error: BaseException | None = None
        try:
            left_out_note = left_out(options.device, device)
            if left_out_note:
                run.note(left_out_note)
            for hook in run.hooks:
                hook.start(run)
            yield run
        except BaseException as raised:
            error = raised
        with run.exits:
            leaving = _end(run, error)
    if leaving is not None:
        raise leaving


def _end(run: Run, error: BaseException | None) -> SystemExit | None:
    """Call every hook's end.

    Returns:
        The SystemExit by which a hook ended a successful run, on every rank: the group then ends as well.

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
