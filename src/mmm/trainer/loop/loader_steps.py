"""Steps over the batches of anyone's data loader, whose workers may fail, saved and taken up again where the script
says what to save (docs/your-script.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmm.data.workers import read
from mmm.errors import ConfigError, DataError
from mmm.optim.adamw import update_shards
from mmm.runtime.seed import seed_step
from mmm.trainer.run.core import Run
from mmm.trainer.run.resume import ResumableRecord, options_in
from mmm.trainer.run.steps import Step, mean_loss, steps_over
from mmm.units import counted

if TYPE_CHECKING:
    from mmm.trainer.loop.script_checkpoints import ScriptCheckpoints


def train_steps(
    run: Run,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    samples: int,
    tokens: int = 0,
    before_row: Callable[[Step], object] = lambda step: None,
    state: Mapping[str, Any] | None = None,
) -> Iterator[Step]:
    """`steps_over` batches, one a step; with `state`, saved and taken up again as the flags of a config say that
    derives from `mmm.trainer.CheckpointOptions`. A collective where it goes on.

    A run that goes on first reads the batches of the steps that are done, each with the random numbers of its step, and
    passes over them.

    Args:
        batches: of this rank, one a step, from the first step of all on.
        optimizer: whose learning rate a row has, and whose step ends the backward.
        steps: of the whole run.
        samples: in the global batch.
        tokens: likewise.
        before_row: called between the body and the row.
        state: what a step needs to be made again, by names of your own: models as `mmm.trainer.build_model` has made
            them, optimizers, and any object with ``state_dict`` and ``load_state_dict`` that is the same on all ranks,
            or has DTensors: schedulers of the learning rate, `mmm.parallel.EMA`, a GradScaler.

    Raises:
        ConfigError: flags of checkpoints without `state`, or `state` without these flags; something in it cannot be
            saved; something that `optimizer` needs is not in it.
        CheckpointError: the checkpoint is of other objects, or of another global batch, or no step is left.
        DataError: also where a data loader's worker fails.
    """
    for updated in (optimizer, *(state or {}).values()):
        update_shards(updated)
    source = read(batches, run.options.timeout)
    checkpoints = _checkpoints(run, optimizer, samples, state)
    if checkpoints is None:
        return steps_over(run, source, optimizer, steps, samples=samples, tokens=tokens, before_row=before_row)
    first = checkpoints.load(steps)
    _pass_over(run, source, first)
    if first == steps:  # the run was interrupted after its last step
        run.note("no step is left to make")

    def before(step: Step) -> None:
        before_row(step)
        checkpoints.before_row(step)

    after = checkpoints.after_row
    return steps_over(
        run, source, optimizer, steps, samples=samples, tokens=tokens, before_row=before, after_row=after, first=first
    )


def _checkpoints(
    run: Run, optimizer: torch.optim.Optimizer, samples: int, state: Mapping[str, Any] | None
) -> ScriptCheckpoints | None:
    """What saves a loop; None where no flag says so."""
    options, record = options_in(run.config), run.hook(ResumableRecord)
    saves = options is not None and (options.resume is not None or options.checkpoint_every is not None)
    if state is None:
        if saves:
            raise ConfigError(
                "--resume and --checkpoint_every: this loop saves nothing, because its train_steps(…) has no state=; "
                'give it state={"model": model, "optimizer": optimizer}, and what else the loop changes'
            )
        return None
    if options is None:
        raise ConfigError(
            "train_steps(…, state=…): the config has no flags of checkpoints; let it derive from CheckpointOptions too"
        )
    from mmm.trainer.loop.script_state import check_alike, sort_state  # a loop with state= only

    sorted_state = sort_state(state, optimizer)
    if not saves:
        return None
    if record is None or record.finish_save is not None:
        raise ConfigError("--checkpoint_every: no hook of the run reads it, or another loop of it is saved already")
    check_alike(run, *sorted_state.describe())
    from mmm.trainer.loop.script_checkpoints import ScriptCheckpoints  # whose import takes seconds

    return ScriptCheckpoints(run, options, sorted_state, samples)


def _pass_over(run: Run, source: Iterator[Any], first: int) -> None:
    """Read the batches of the steps that are done."""
    begin, coordinate = time.perf_counter(), run.layout.dp_coordinate(run.rank.rank)
    for number in range(first):
        seed_step(run.seed, number, coordinate)
        if next(source, None) is None:
            batches = counted(number, "batch", "batches")
            raise DataError(f"the data ended after {batches}, and {first} steps that are done took one each")
    if first:
        seconds = time.perf_counter() - begin
        run.log.info("the batches of the %d steps that are done were read again in %.1f s", first, seconds)


def evaluate(run: Run, batches: Iterable[Any], local_loss: Callable[[Any], Tensor]) -> float:
    """`mean_loss` over batches. Raises DataError also where a data loader's worker fails."""
    return mean_loss(run, read(batches, run.options.timeout), local_loss)
