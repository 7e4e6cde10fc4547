"""Around the steps of a loop: of a program with a loop of its own (docs/your-script.md), and of the examples.

The batch has been fetched when the body begins (``dtd``); `Step.log` ends the forward (``dtf``), the optimizer's step
the backward (``dtb``), and the end of the body the rest (``dto``). Then the step is logged and recorded. The row is a
collective: every rank goes through every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmm.errors import ConfigError, DataError
from mmm.optim.adamw import learning_rate
from mmm.parallel.local import detached
from mmm.runtime.seed import seed_step
from mmm.trainer.run.core import Run
from mmm.units import counted


@dataclass
class Step:
    """One optimizer step.

    Attributes:
        number: from 0. batch: this rank's samples of the global batch, on the run's device. last: of the run.
        due: whether the row is logged. row: further numbers of it, for the loop's body to add to.
    """

    run: Run
    number: int
    batch: Any
    last: bool = False
    due: bool = True
    row: dict[str, float | Tensor] = field(default_factory=dict)
    _losses: list[Tensor] = field(default_factory=list)

    @property
    def local_loss(self) -> Tensor:
        """This rank's, once `log` has been called: on the device. A ConfigError before."""
        if not self._losses:
            raise ConfigError(
                f"step {self.number} ended without step.log(loss): the body of the loop calls it once the forward is "
                "over, with this rank's part of the loss"
            )
        return sum(self._losses[1:], self._losses[0])

    def log(self, loss: Tensor) -> None:
        """The forward is over.

        Args:
            loss: of this rank's samples, divided by the global count. With micro-batches, of one of them: they add up.
        """
        self.run.clock.lap("dtf")
        self._losses.append(detached(loss))


def steps_over(
    run: Run,
    source: Iterator[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    samples: int,
    tokens: int = 0,
    at: Mapping[str, int] | None = None,
    before_row: Callable[[Step], object] = lambda step: None,
    after_row: Callable[[Step], object] = lambda step: None,
    first: int = 0,
    depth: int = 2,
) -> Iterator[Step]:
    """The steps of a loop, fetched, timed, logged and recorded around its body. Before each the default generators are
    seeded: what is drawn in it is a function of seed, step and data-parallel coordinate (`mmm.runtime.seed`).

    Args:
        source: this rank's batches, one a step; `Step.batch` is one `on_device`.
        samples: in the global batch.
        tokens: likewise.
        at: what a row says besides its step, such as ``{"stage": 1}``.
        before_row, after_row: called between the body and the row, and after it.
        first: step that is made.
        depth: as of `Run.row`.

    Raises:
        ConfigError: the body has not called `Step.log`.
        DataError: there are fewer batches than steps.
        DivergedError: a loss that is not finite, on every rank.
    """
    rates = laps_updates(run, optimizer)
    coordinate = run.layout.dp_coordinate(run.rank.rank)
    for number in range(first, steps):
        run.clock.start()
        run.clock.step = number
        seed_step(run.seed, number, coordinate)
        if (batch := next(source, None)) is None:
            batches = counted(number, "batch", "batches")
            raise DataError(f"the data ended after {batches}, and {steps} steps take one each")
        last = number == steps - 1
        step = Step(run, number, on_device(run, batch), last, due=last or number % run.log_every == 0)
        run.clock.lap("dtd")
        yield step
        run.clock.lap("dto")
        before_row(step)
        run.row(
            {**(at or {}), "iter": number},
            {"loss": step.local_loss},
            samples=samples,
            tokens=tokens,
            more={**rates, **step.row},
            due=step.due,
            depth=depth,
        )
        after_row(step)


def laps_updates(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Let each update of an optimizer end the backward (``dtb``). ``lr``, of the newest, stands in what is returned."""
    rates: dict[str, float] = {}

    def before_update(*_: object) -> None:
        run.clock.lap("dtb")
        rates["lr"] = learning_rate(optimizer)

    optimizer.register_step_pre_hook(before_update)
    return rates


@torch.no_grad()
def mean_loss(run: Run, batches: Iterable[Any], local_loss: Callable[[Any], Tensor]) -> float:
    """The mean over global batches of the loss. A collective.

    Args:
        batches: of this rank, each of which `local_loss` gets `on_device`, and gives this rank's part of the loss for.

    Raises:
        DataError: there is none.
    """
    losses = [detached(local_loss(on_device(run, batch))) for batch in batches]
    if not losses:
        raise DataError(
            "there is no batch to evaluate on: the data held out are fewer than a batch, or the iterator over them has "
            "been used up; give it a loader that begins anew each time"
        )
    return run.global_sum(sum(losses[1:], losses[0])) / len(losses)


def on_device(run: Run, batch: Any) -> Any:
    """A tensor, or those in a list, tuple or dict, on the run's device; floats in the dtype of the weights."""
    if isinstance(batch, Tensor):
        return batch.to(run.device, run.precision.storage if batch.is_floating_point() else None)
    if isinstance(batch, dict):
        return {name: on_device(run, part) for name, part in batch.items()}
    return [on_device(run, part) for part in batch] if isinstance(batch, list | tuple) else batch
