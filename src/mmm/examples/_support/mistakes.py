"""A run with a mistake in it (``--break NAME``), beside the same steps on one device.

Each rank computes the first `STEPS` steps once more: the full model, from the same weights, on the whole global batch.
At each step of the optimizer it compares the gradients that the ranks have made with those, and after it the losses.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.data import Batch
from mmm.errors import ConfigError
from mmm.nn.draw import canonical_name, convert
from mmm.parallel import cross_entropy, draw_weights
from mmm.run.hook import Hook
from mmm.run.run import Run
from mmm.trainer.config import command_line

Config = TypeVar("Config")

STEPS = 3
EXIT = 1
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-1, "fp16": 1e-1}  # relative: sums go in another order


@dataclass(frozen=True, kw_only=True)
class BreakOptions:
    """An example that can show mistakes."""

    BREAKS: ClassVar[dict[str, str]] = {}  # name → what is broken, in one sentence, and why that is wrong
    break_: Annotated[str | None, tyro.conf.arg(name="break", metavar="NAME")] = None
    """Make one of the mistakes named above, show how far loss and gradients then are from those of one device, and end
    with exit code 1."""

    def check(self) -> None:
        """Raises ConfigError for a mistake that is none of the example's."""
        if self.break_ is not None and self.break_ not in self.BREAKS:
            raise ConfigError(f"--break {self.break_}: it is one of {', '.join(self.BREAKS)}")


def parse(config: type[Config], doc: str | None = None) -> Config:
    """`mmm.trainer.config.command_line.parse`, where the help says what mistakes there are."""
    if issubclass(config, BreakOptions):
        wrapper = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="    ")
        mistakes = [wrapper.fill(f"{name}: {why}") for name, why in config.BREAKS.items()]
        doc = "\n".join((doc or "", "--break NAME makes a mistake:", "", *mistakes))
    return command_line.parse(config, doc)


def main(train: Callable[[Config], bool | None], config: type[Config], doc: str | None) -> None:
    """Run an example as a command. It ends with exit code 1 where `train` returns False: something is wrong."""

    def program() -> None:
        if train(parse(config, doc)) is False:
            sys.exit(1)

    command_line.run_main(program)


def mistake_of(run: Run) -> str | None:
    """The mistake that --break asks for."""
    return run.config.break_ if isinstance(run.config, BreakOptions) else None


class MistakeOnPurpose(Hook):
    """Ends a run with ``--break``, once its record is complete, with exit code 1. It is the last hook."""

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and mistake_of(run) is not None:
            dist.barrier()  # rank 0 has written its record before an exit code ends the run
            raise SystemExit(EXIT)  # on every rank, whatever it found


class OneDevice:
    """The same steps on one device.

    Args:
        model: unsharded, on the meta device. ranks: what this rank trains, in one module or (a pipeline) several.
        optimizer: of `ranks`. global_batch: the whole global batch of a step, on the run's device.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        ranks: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        global_batch: Callable[[int], Batch],
    ) -> None:
        convert(model, run.precision.storage)
        draw_weights(model, run.device, run.seed)
        self.run, self.model, self.ranks, self.global_batch = run, model, list(ranks), global_batch
        self.optimizer = type(optimizer)(model.parameters(), lr=optimizer.param_groups[0]["lr"])  # type: ignore[call-arg]
        # Of each step the loss of all ranks and of one device, and by parameter, in the model's order, the largest
        # difference of gradients over the largest element of one device's.
        self.steps: list[dict[str, Any]] = []
        optimizer.register_step_pre_hook(lambda *_: self._step())

    def _step(self) -> None:
        """One step on one device, and how far the ranks' gradients are from its own. A collective."""
        precision, batch = self.run.precision, self.global_batch(len(self.steps))
        with torch.autocast(self.run.device.type, precision.compute, enabled=precision.mixed):
            logits = self.model(batch.inputs)
        loss = cross_entropy(logits, batch.targets, batch.count)
        loss.backward()
        parameters = {canonical_name(name): p for module in self.ranks for name, p in module.named_parameters()}
        expected = {canonical_name(name): p.grad for name, p in self.model.named_parameters()}
        differences = {name: _apart(p.grad, expected[name]) for name, p in parameters.items()}
        everyone: list[Any] = [differences] * dist.get_world_size()
        dist.all_gather_object(everyone, differences)
        largest = {name: _largest(found[name] for found in everyone if name in found) for name in expected}
        self.steps.append({"expected": loss.item(), "gradients": largest, "loss": math.nan})
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, loss: float) -> None:
        """The loss of all ranks, of the step whose gradients came last."""
        self.steps[-1]["loss"] = loss

    def report(self) -> None:
        """Say it, and keep it in the record."""
        run, limit = self.run, TOLERANCE[self.run.precision.name]
        name = mistake_of(run)
        assert name is not None
        lines = [
            f"--break {name}, on purpose",
            *textwrap.wrap(run.config.BREAKS[name], 116),
            f"step{'loss':>12}{'one device':>14}{'apart':>10}   gradients",
        ]
        shows: list[str] = []  # where, the first first
        for number, step in enumerate(self.steps):
            loss, expected, gradients = step["loss"], step["expected"], step["gradients"]
            loss_apart = abs(loss / expected - 1)
            if not loss_apart <= limit:
                shows.append(f"the loss of step {number}")
            wrong = [name for name, apart in gradients.items() if not apart <= limit]  # NaN is wrong as well
            text = f"{_largest(gradients.values()):.1e} apart"
            if wrong:
                shows.append(f"the gradients of step {number} ({wrong[0]})")
                also = f"wrong in {len(wrong)} of {len(gradients)} parameters"
                text = f"{gradients[wrong[0]]:.1e} apart in {wrong[0]}, and {also}"
            lines.append(f"{number:<4}{loss:>12.6f}{expected:>14.6f}{loss_apart:>10.1e}   {text}")
        if shows:
            lines.append(f"It shows first in {', then in '.join(shows[:2])}.")
        else:
            lines.append(f"It does not show in {len(self.steps)} steps on the layout {run.layout}.")
        run.log.info("%s", "\n".join(lines), stacklevel=3)  # of the program
        run.describe(broken={"name": name, "steps": self.steps})


def _largest(differences: Iterable[float]) -> float:
    """NaN where one is: Python's `max` may pass it over."""
    return torch.tensor([*differences], dtype=torch.float64).max().item()


@torch.no_grad()
def _apart(gradient: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference, over the largest element of `expected`. A collective of the ranks that share it."""
    if gradient is None:
        return 0.0 if expected is None else math.inf
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    if expected is None:  # one device did not use the parameter
        return math.inf if full.count_nonzero() else 0.0
    full = full.flatten()[: expected.numel()].view_as(expected)  # flat, and padded, where an example shards it by hand
    return float((full - expected).abs().max() / expected.abs().max())
