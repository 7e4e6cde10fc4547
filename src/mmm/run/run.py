"""A run on one rank: device, process group, seed, log, clock; and the one loop that every program has.

::

    with start_run("lm", config, job, Folder(checkpoints), hooks) as run:
        model, optimizer = …
        # What checkpoints save. A resumed run loads it here.
        run.state(model=model, optimizer=optimizer)
        for step in run.steps(batches, job.steps, samples=job.global_batch_size):
            loss = …
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

The body of the loop belongs to the program. Around it, the run fetches, seeds, times, logs and records. Everything else
is a `mmm.run.hook.Hook`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.data.workers import read
from mmm.errors import ConfigError, DataError, DeviceError, DivergedError
from mmm.layout import Layout
from mmm.optim.adamw import learning_rate
from mmm.parallel.local import detached
from mmm.run.comm import TorchComm, current_comm
from mmm.run.hook import Hook, Loop
from mmm.run.options import flags_of, run_flags
from mmm.run.rows import Row, RowSoFar, StepOnDevice, UnreadSteps, not_finite_text, on_host, place_text, sums_in_order
from mmm.run.step import Step
from mmm.runtime.clock import PARTS, PIPELINE_PARTS, StepClock
from mmm.runtime.device import Precision, choose_device, choose_precision, deterministic, full_float32
from mmm.runtime.log import get_logger, ignore_views, logging_to, say_once
from mmm.runtime.ranks import Rank, whoami
from mmm.runtime.seed import seed_start, seed_step
from mmm.runtime.waits import timed_waits
from mmm.units import counted

if TYPE_CHECKING:
    from mmm.run.folder import Folder

# The run ends after this many skipped steps in a row. The scale of fp16 begins at 2 ** 16, and each skipped step halves
# it, so a healthy run skips at most about 16.
MOST_SKIPPED = 20
NO_MPS = (
    "--device mps: {} makes process groups, and PyTorch has none for MPS; use --device cpu, or one of "
    "mmm.trainer.lm, mmm.trainer.vit and mmm.trainer.cnn"
)
# An iterable of batches, or an object with ``from_step``.
Batches = Any


@dataclass
class Run:
    """What a program holds while it trains.

    Attributes:
        name: short name of the program.
        config: all flags of the program.
        options: the group ``run`` of the flags: where the program runs, for how long, and what it leaves.
        job: layout, techniques and sizes, decided before the ranks met: a `mmm.trainer.job.Job`.
            None for a program that brings its own model.
        rank: this process.
        layout: the layout, fitted to the number of ranks.
        device: this rank's device.
        precision: data types of parameters, computation and communication.
        comm: how the ranks communicate outside of the model.
        clock: times the parts of a step.
        hooks: the hooks, in the order in which they are called.
        folder: the run's folder, the last of the hooks.
        objects: the objects that were given to `state`, by name.
        first: first step that this process makes: 0 unless it resumes from a checkpoint.
        facts: what hooks and the program have passed to `describe`, for the record's config.json.
        unread: losses and gradient norms since the last logged row. They are still on the device.
        so_far: sum of the losses of the current row.
        unnamed_models: number of models that `mmm.run.build` has made without a name. Each gets weights of its own.
        constructor_states: states of the random generators after the last constructor of an unnamed model, from which
            the next one continues.
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
    folder: Folder
    objects: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    facts: dict[str, Any] = field(default_factory=lambda: {"notes": []})
    unread: UnreadSteps = field(default_factory=UnreadSteps)
    so_far: RowSoFar = field(default_factory=RowSoFar)
    unnamed_models: int = 0
    constructor_states: Any = None

    @property
    def outdir(self) -> Path | None:
        """The run's folder, on rank 0, which alone writes the record."""
        return self.folder.path

    @property
    def seed(self) -> int:
        seed: int = self.options.seed
        return seed

    @property
    def exact(self) -> bool:
        """Whether losses are summed in an order that no mesh changes (`--exact`)."""
        return self.job is not None and self.job.techniques.exact is not None

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The value of every flag of the program, by name."""
        return flags_of(self.config)

    @property
    def log(self) -> Logger:
        return get_logger()

    def note(self, text: str) -> None:
        """Log a sentence once, such as which fallback was taken and why, and keep it in the record."""
        if say_once(text, stacklevel=3):
            self.describe(note=text)

    def describe(self, **facts: Any) -> None:
        """Keep facts of the run. The record writes them to its config.json.

        Args:
            facts: values by name. `note` is a sentence, which is added to the list ``notes``.
        """
        if "note" in facts:
            self.facts["notes"].append(facts.pop("note"))
        self.facts.update(facts)
        self.folder.describe(self)

    def add_row(self, values: Mapping[str, float]) -> None:
        """Record a row that belongs to no step, such as a line of a table. Rank 0 records it; others do nothing."""
        if self.folder.rows is not None:
            self.folder.rows.update(values)

    def state(self, **objects: Any) -> None:
        """Name every object that training changes. Checkpoints save them; a resumed run loads them here. A collective.

        Functions of seed and step need not be saved: batches, random numbers, and a learning rate that the program
        computes from the step, as the trainers do.

        Args:
            objects: models, optimizers, and anything with ``state_dict`` and ``load_state_dict`` that is the same on
                all ranks, or has DTensors: schedulers of the learning rate, `mmm.parallel.EMA`, a GradScaler.

        Raises:
            ConfigError: one of them cannot be saved.
            CheckpointError: the checkpoint has other objects, or no step is left.
        """
        self.objects = objects
        for optimizer in self._optimizers():
            optimizer.register_step_pre_hook(self._before_update)
        for hook in self.hooks:
            hook.state(self)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [value for value in self.objects.values() if isinstance(value, torch.optim.Optimizer)]

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Remember the learning rate of the first optimizer, and end the time of backward."""
        # A schedule may change the rate after the update, before the row is written.
        if optimizer in self._optimizers()[:1]:
            self.so_far.rate = learning_rate(optimizer)
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
        """Yield the steps that are left. Each is fetched, seeded, timed, logged and recorded around its body.

        Args:
            batches: this rank's batches, one per step: an iterable, or an object whose ``from_step(first)`` returns an
                iterable that begins there. A resumed run reads an iterable from its start and drops the batches of the
                steps that were made before. If the object has ``shared_facts()``, a dict of texts, the ranks compare
                it.
            steps: number of steps of this loop, with those that were made before a resume.
            samples: number of samples in the global batch.
            tokens: number of tokens in it; 0 if samples are not text.
            eval_every: number of steps between two evaluations; the last step is evaluated as well. 0: only the last.
                None: there are no evaluations.
            epoch: number of steps in an epoch. Each row then covers one epoch, with the mean of its losses as
                ``train_loss``.
            place: what a row says besides its step, such as ``{"stage": 1}``.

        Raises:
            ConfigError: the body has not called `Step.log`.
            DataError: there are fewer batches than steps; a data loader's worker has failed; the ranks have different
                data.
            DivergedError: a loss is not finite, a gradient that the body has checked is not finite, or too many steps
                in a row were skipped. It is raised on every rank.
        """
        dp_coordinate = self.layout.dp_coordinate(self.rank.rank)
        pp_coordinate = self.layout.coordinates(self.rank.rank)["pp"]
        # Whether this rank has a part of the global loss.
        has_loss = self.layout.has_loss(self.rank.rank)
        for hook in self.hooks:
            hook.loop(self, Loop(batches, steps, samples))
        # A run that was interrupted after its last step has only its end left to do.
        if self.first > 0 and self.first == steps:
            self.note("no step is left to make")
        source = self._from_first(batches, dp_coordinate)
        begins_row = True
        for index in range(self.first, steps):
            # An epoch's row has the seconds of all its steps together, so the clock starts once an epoch. The seconds
            # of other rows are the mean over the steps since the row before, so it starts at every step.
            if begins_row or epoch is None:
                self.clock.start()
            step = self._plan_step(index, steps, eval_every, epoch, place or {})
            self.clock.step = index
            self.so_far.rate = None
            # Ranks that share samples draw the same random numbers while they fetch: a loader that shuffles has to give
            # all of them the same samples.
            seed_step(self.seed, index, dp_coordinate)
            for hook in self.hooks:
                hook.begin(self, step)
            step.batch = next(source, None)
            if step.batch is None:
                raise DataError(
                    f"the data ended after {counted(index, 'batch', 'batches')}, and {steps} steps take one each"
                )
            # A batch that is a list has a `count` too, but as a method.
            count = getattr(step.batch, "count", None)
            if isinstance(count, int | Tensor):
                step.count = count
            if self.layout.pp > 1:
                # Pipeline ranks hold different layers, so from here on each draws its own numbers.
                seed_step(self.seed, index, dp_coordinate * self.layout.pp + pp_coordinate)
            self.clock.lap("dtd")
            # A pipeline's schedule, and micro-batches, time their backwards themselves (`StepClock.model_lap`).
            self.clock.optimizer_ends_backward = self.layout.pp == 1
            # The body of the program's loop runs here: forward, backward and the optimizer's update.
            yield step
            self.clock.optimizer_ends_backward = False
            self.clock.end_step()
            # Also the row of an epoch says at which step something was not finite.
            step_place = {**step.place, "iter": index}
            self.unread.add(step_place, step.local_loss, has_loss, step.norms, step.names, step.skip, step.count)
            # An epoch's loss is the mean over its steps, without those that were skipped. The loss of any other row is
            # that of a single step.
            skip = None if epoch is None else step.skip
            self.so_far.add(step.local_loss, skip)
            if step.ends_row:
                loss_name = "loss" if epoch is None else "train_loss"
                self._end_row(step, loss_name, samples, tokens)
            elif step.saves:
                self._refuse_not_finite(step)
            begins_row = step.ends_row
            for hook in self.hooks:
                hook.finish(self, step)
            # The seconds of an epoch's row include a save in the middle of it: it counts as the optimizer's time.
            if step.saves and not begins_row:
                self.clock.end_step()
            # A hook may have made this step the last one.
            if step.last:
                break
        # Another loop of the same run begins at its own first step.
        self.first = 0

    def _plan_step(
        self,
        index: int,
        steps: int,
        eval_every: int | None,
        epoch: int | None,
        place: Mapping[str, int],
    ) -> Step:
        """Make a step, and decide from the flags whether it is the last, and whether it is evaluated and logged."""
        last = index == steps - 1
        finished_steps = index + 1
        step = Step(self, index, last=last)
        if epoch is not None:
            # Epochs count from 1.
            step.place = {**place, "epoch": index // epoch + 1}
            step.ends_row = last or finished_steps % epoch == 0
            step.due = step.ends_row
            step.evaluates = step.ends_row and eval_every is not None
            return step
        step.place = {**place, "iter": index}
        if eval_every is not None:
            is_turn = eval_every > 0 and finished_steps % eval_every == 0
            step.evaluates = last or is_turn
        is_logged = index % self.options.log_every == 0
        step.due = last or step.evaluates or is_logged
        return step

    def _from_first(self, batches: Batches, coordinate: int) -> Iterator[Any]:
        """The batches of the steps that this process makes, from `first` on."""
        if hasattr(batches, "from_step"):
            return self.read(batches.from_step(self.first))
        source = self.read(batches)
        began = time.perf_counter()
        for index in range(self.first):
            # Batches may depend on random numbers of their step.
            seed_step(self.seed, index, coordinate)
            if next(source, None) is None:
                read_so_far = counted(index, "batch", "batches")
                raise DataError(
                    f"the data ended after {read_so_far}, and {self.first} steps that are done took one each"
                )
        if self.first:
            seconds = time.perf_counter() - began
            self.log.info("skipped the data of the %d finished steps (%.1f s)", self.first, seconds)
        return source

    def read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an iterable, such as a `DataLoader`, moved to the device.

        Raises:
            DataError: a data loader's worker has failed.
        """
        return map(self.on_device, read(batches, self.options.timeout))

    def _end_row(self, step: Step, loss_name: str, samples: int, tokens: int) -> None:
        """Log and record the row that this step ends, if it is due. A collective."""
        steps = self.so_far.steps
        if step.due:
            values: dict[str, float | Tensor] = {}
            rate = self._learning_rate()
            if rate is not None:
                values["lr"] = rate
            values |= step.row
            self.row(
                step.place,
                {loss_name: self.so_far.mean()},
                samples=samples * steps,
                tokens=tokens * steps,
                values=values,
            )
        self.so_far = RowSoFar()

    def _refuse_not_finite(self, step: Step) -> None:
        """End the run if a step of the row under way was not finite, so that its weights are not saved. A collective.

        The row itself finds that at its end, which is after the save.
        """
        by_rank = self.comm.table(self.unread.columns(self.so_far.mean()))
        _, wrong = self.unread.read(by_rank, self.layout.loss_rank_slice)
        # A step that was skipped has changed no weight.
        if wrong is not None and step.skip is None:
            self._not_finite(wrong)

    def _learning_rate(self) -> float | None:
        """The rate of the first optimizer at its last update in this step; if it made none, its rate now."""
        if self.so_far.rate is not None:
            return self.so_far.rate
        optimizers = self._optimizers()
        if not optimizers:
            return None
        return learning_rate(optimizers[0])

    def row(
        self,
        place: Mapping[str, int],
        local_loss: Mapping[str, Tensor],
        *,
        samples: int,
        tokens: int = 0,
        values: Mapping[str, float | Tensor] | None = None,
    ) -> Row:
        """Log and record what has happened since the last row. A collective, and the host waits for the device.

        Seconds and rates are the means over the steps since then.

        Args:
            place: where the run is, such as ``{"iter": 3}``.
            local_loss: this rank's loss, detached from the graph, by its name in the row: a dict with one entry.
            samples: number of samples since the clock was started.
            tokens: number of tokens in them.
            values: further values of the row. Tensors are the same on all ranks.

        Raises:
            DivergedError: as `steps`.
        """
        ((loss_name, local),) = local_loss.items()
        values = dict(values or {})
        tensors = {name: detached(value) for name, value in values.items() if isinstance(value, Tensor)}
        seconds = self.clock.read()
        by_rank = self._gather_row(local, tensors, seconds)
        # Rank 0, which alone has `outdir`, writes the row: it copies the whole table to the host, and so waits for the
        # device. The other ranks copy only the summary, below.
        table = None
        if self.outdir is not None:
            table = on_host(by_rank)
            by_rank = torch.from_numpy(table)
        loss, wrong = self.unread.read(by_rank, self.layout.loss_rank_slice, self.exact)
        skipped = self.unread.forget()
        row = Row(place, loss, samples, tokens)
        if table is not None:
            # Columns of the table: those of `UnreadSteps`, then the tensors, then the seconds.
            first_tensor = UnreadSteps.COLUMNS
            first_second = first_tensor + len(tensors)
            own_tensors = table[self.rank.rank, first_tensor:first_second].tolist()
            values |= dict(zip(tensors, own_tensors, strict=True))
            if skipped is not None:
                values["skipped"] = skipped
            # Each of shape (ranks,).
            per_rank = dict(zip(seconds, table.T[first_second:], strict=True))
            row.fill(loss_name, seconds, values, per_rank)
        for hook in self.hooks:
            hook.row(self, row)
        if row.line:
            self.log.info(row.line, stacklevel=_depth_of_program())
        if wrong is not None:
            self._not_finite(wrong)
        elif not math.isfinite(loss):
            # The loss of each rank is finite, and their sum is not.
            raise self._diverged(f"the loss is {loss} at {place_text(place)}")
        return row

    def _gather_row(self, local: Tensor, tensors: Mapping[str, Tensor], seconds: Mapping[str, float]) -> Tensor:
        """Gather what a row needs from every rank. A collective; the host does not wait for the device.

        Returns:
            (ranks, columns): those of `UnreadSteps.columns`, then `tensors`, then `seconds`.
        """
        from_host = torch.tensor([*seconds.values()], dtype=local.dtype)
        # From pageable memory the host would wait for the copy.
        if self.device.type in ("cuda", "xpu"):
            from_host = from_host.pin_memory()
        columns = [self.unread.columns(local)]
        for value in tensors.values():
            columns.append(value.view(1).to(local))
        columns.append(from_host.to(local.device, non_blocking=True))
        return self.comm.table(torch.cat(columns))

    def _not_finite(self, step: StepOnDevice) -> None:
        """Say once where something was not finite. A collective.

        The run ends here if the program skips no steps, or has skipped too many in a row.
        """
        if isinstance(step.count, Tensor) and not step.count.item():
            raise DataError(
                f"no token in the global batch of {place_text(step.place)} has a target: each is the last of its "
                "document, or padding; use a larger batch, or longer documents",
                on_every_rank=True,
            )
        unread = self.unread
        too_many = unread.skipped_in_a_row >= MOST_SKIPPED
        continues = step.skip is not None and not too_many
        if continues and unread.has_said_skip:
            return
        text = not_finite_text(step.place, self.comm.gather_everywhere(step.about()))
        if continues:
            unread.has_said_skip = True
            self.note(f"{text}: all ranks have skipped the step; a row's `skipped` counts such steps")
            return
        if too_many:
            text = f"{unread.skipped_in_a_row} steps in a row were skipped; the first skipped step of this row: {text}"
        raise self._diverged(text)

    def _diverged(self, text: str) -> DivergedError:
        rate = self.flags.get("lr")
        advice = f"lower --lr ({rate})" if isinstance(rate, float) else "lower the learning rate"
        if self.precision.mixed:
            advice += ", or try --dtype fp32"
        return DivergedError(f"{text}: {advice}", on_every_rank=True)

    @contextmanager
    def evaluating(self, *models: Any) -> Iterator[None]:
        """Inside, models are in evaluation mode, nothing has a gradient, and the time counts for no step."""
        self.clock.pause()
        # Without dropout, and with the running means of batch norms.
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
            local_losses: this rank's part of the loss of each global batch.

        Raises:
            DataError: there is no batch.
        """
        losses = [detached(loss) for loss in local_losses]
        if not losses:
            raise DataError(
                "there is no batch to evaluate on: the held-out data are smaller than one batch, or their iterator has "
                "been used up; give it more data, or a loader that begins anew each time"
            )
        total = sum(losses[1:], losses[0])
        return self.global_sum(total) / len(losses)

    def global_sum(self, local: float | Tensor) -> float:
        """The sum of a number over all data-parallel coordinates. A collective: every rank calls it."""
        if isinstance(local, Tensor):
            (total,) = self.global_sums(detached(local).view(1))
        else:
            (total,) = self.global_sums([local])
        return total

    def global_sums(self, local: list[float] | Tensor) -> list[float]:
        """`global_sum` of several numbers at once. A collective.

        Args:
            local: numbers on the host, or a tensor of shape (n,) on the device.
        """
        if isinstance(local, Tensor):
            by_rank = self.comm.table(local)
        else:
            by_rank = self.comm.floats(local, self.device)
        return sums_in_order(on_host(by_rank[self.layout.loss_rank_slice]))

    def on_device(self, batch: Any) -> Any:
        """Move a tensor, or those in a list, tuple or dict, to the device. Floats get the dtype of the weights."""
        if isinstance(batch, Tensor):
            dtype = self.precision.storage if batch.is_floating_point() else None
            return batch.to(self.device, dtype)
        if isinstance(batch, dict):
            return {name: self.on_device(value) for name, value in batch.items()}
        if isinstance(batch, list | tuple):
            return [self.on_device(value) for value in batch]
        return batch


def _depth_of_program() -> int:
    """Returns a ``stacklevel`` for logging, such that a log line names the file of the program's loop.

    Without it, the line would name this file, or one that programs share.
    """
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None:
        folder = Path(frame.f_code.co_filename).parent.name
        if folder not in ("run", "_support"):
            break
        frame = frame.f_back
        depth += 1
    return depth


@contextmanager
def start_run(
    name: str,
    config: Any,
    job: Any,
    folder: Folder,
    hooks: Sequence[Hook],
    *,
    runs_on_mps: bool = False,
) -> Iterator[Run]:
    """Set a run up for the length of a ``with`` block, and call the end of every hook after it.

    Everything that can be refused without the other ranks is refused before they meet. A script of your own calls
    `mmm.trainer.start_run`, which calls this function with the hooks that most programs have.

    Args:
        name: short name of the program, for its folder and its messages.
        config: the program's flags. Its group ``run``, or the config itself, says where it runs.
        job: what was decided before the ranks meet; or only the layout, fitted to the number of ranks.
        folder: the run's folder.
        hooks: the other hooks, in the order in which they are called, each before the folder.
        runs_on_mps: whether one rank on MPS can run the program.

    Raises:
        UserError: a hook refuses the run; the config has no `RunFlags`, or the job no layout.
        DeviceError: MPS cannot run the program.
    """
    options = run_flags(config)
    layout = job if isinstance(job, Layout) else getattr(job, "layout", None)
    if not isinstance(layout, Layout):
        raise ConfigError(
            f"start_run: the job is of the class {type(job).__name__}: it takes a layout that is fitted to the ranks, "
            "Layout(…).fit(whoami().world_size), or what has one as its attribute layout"
        )
    comm = current_comm()
    rank = comm.locate(whoami(), options.timeout)
    device = choose_device(options.device, rank)
    if device.type == "mps" and not runs_on_mps:
        raise DeviceError(NO_MPS.format(name))
    precision = choose_precision(options.dtype, device)
    if isinstance(job, Layout):
        job = None
    clock = StepClock(device, PARTS if layout.pp == 1 else PIPELINE_PARTS)
    all_hooks = [*hooks, folder]
    run = Run(name, config, options, job, rank, layout, device, precision, comm, clock, all_hooks, folder)
    for hook in run.hooks:
        hook.before(run)

    def meet(store: dist.Store) -> None:
        for hook in run.hooks:
            hook.meet(run, store)

    # The program may draw random numbers before its first step: initial weights, for example.
    seed_start(run.seed, layout.dp_coordinate(rank.rank))
    with ExitStack() as stack:
        # Refuses what is set wrong, so it comes before the ranks meet.
        stack.enter_context(deterministic(options.deterministic, device))
        stack.enter_context(comm.group(run, meet))
        stack.enter_context(full_float32(precision))
        stack.enter_context(ignore_views())
        # In a dry run nobody waits.
        if options.own_work and not comm.dry:
            stack.enter_context(timed_waits(clock))
        log_file = None if run.outdir is None else run.outdir / "log.txt"
        # A dry run says nothing itself: it logs as any rank but the first.
        log_rank = 1 if comm.dry else rank.rank
        stack.enter_context(logging_to(log_rank, log_file, options.log_all_ranks, options.verbose))
        error: BaseException | None = None
        try:
            for hook in run.hooks:
                hook.start(run)
            # The program runs here.
            yield run
        except BaseException as raised:
            error = raised
        leaving = _end(run, error)
    if leaving is not None:
        raise leaving


def _end(run: Run, error: BaseException | None) -> SystemExit | None:
    """Call the end of every hook.

    Returns:
        The SystemExit that a hook raised to end a successful run, or None. It is returned, so that the caller can close
        the process group before it raises it. All ranks end in this way, or none.

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
    if leaving is not None:
        # The first exit code ends the whole run, so all wait until rank 0 has written its record.
        run.comm.gather(None)
    return leaving
