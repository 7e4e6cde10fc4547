"""A run with a mistake in it (``--break NAME``), compared with the same steps on one device.

Each rank computes the first `STEPS` steps once more: the full model, from the same weights, on the whole global batch.
At each step of the optimizer it compares the gradients that the ranks have made with those, and after it the losses.
"""

from __future__ import annotations

import copy
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.comparison import relative_error, worst
from mmm.data import Batch
from mmm.errors import ConfigError
from mmm.nn.draw import canonical_name, convert
from mmm.parallel.local import draw_weights
from mmm.parallel.loss import cross_entropy
from mmm.run import command_line
from mmm.run.hook import Hook
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.trainer.job import Job

Config = TypeVar("Config")
GlobalBatch = Callable[[Run, int], Batch]  # of a step

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
    """`mmm.run.command_line.parse`, where the help says what mistakes there are."""
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


def for_a_mistake(config: Any, job: Job) -> Job:
    """The job, which with ``--break`` ends after a few steps."""
    if isinstance(config, BreakOptions) and config.break_ is not None:
        return replace(job, steps=min(job.steps, STEPS))
    return job


def mistake_of(run: Run) -> str | None:
    """The mistake that --break asks for."""
    return run.config.break_ if isinstance(run.config, BreakOptions) else None


def global_text(run: Run, step: int) -> Batch:
    """The whole global batch of a step of text, on the run's device."""
    samples = run.job.global_batch_size
    return run.job.data.train.batch(step, samples, 0, samples).to(run.device)


class MistakeOnPurpose(Hook):
    """With ``--break``, makes the steps of a run once more, on one device: this one. The run ends with exit code 1.

    It is the last hook: the record is complete when the run ends.

    Args:
        global_batch: the whole global batch of a step, on the run's device.

    Attributes:
        steps: of each step the losses of the ranks and of one device, and the difference of each parameter's gradient.
    """

    def __init__(self, global_batch: GlobalBatch) -> None:
        self.global_batch = global_batch
        self.model_on_meta: nn.Module | None = None
        self.steps: list[dict[str, Any]] = []

    def before(self, run: Run) -> None:
        if mistake_of(run) is not None and run.job is not None:
            self.model_on_meta = copy.deepcopy(run.job.model)  # the program shards its own

    def state(self, run: Run) -> None:
        """A loop begins: draw the weights on one device, and make its optimizer."""
        if self.model_on_meta is None:
            return
        self.steps = []
        self.model = copy.deepcopy(self.model_on_meta)
        convert(self.model, run.precision.storage)
        draw_weights(self.model, run.device, run.seed)
        of_ranks = run.objects["optimizer"]
        self.optimizer = type(of_ranks)(self.model.parameters(), lr=of_ranks.param_groups[0]["lr"])
        of_ranks.register_step_pre_hook(lambda *_: self._step(run))

    def _step(self, run: Run) -> None:
        """Make a step on one device, and compare the ranks' gradients with its own. A collective."""
        batch = self.global_batch(run, len(self.steps))
        with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
            logits = self.model(batch.inputs)
        loss = cross_entropy(logits, batch.targets, batch.count)
        loss.backward()
        expected = {canonical_name(name): p.grad for name, p in self.model.named_parameters()}
        differences = {}
        for module in run.objects.values():
            if isinstance(module, nn.Module):
                for full_name, p in module.named_parameters():
                    name = canonical_name(full_name)
                    differences[name] = gradient_difference(p.grad, expected[name])
        by_rank = run.comm.gather_everywhere(differences)
        largest = {name: worst(own[name] for own in by_rank if name in own) for name in expected}
        self.steps.append({"expected": loss.item(), "gradients": largest})
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self, run: Run, step: Step) -> None:
        if self.model_on_meta is not None:
            self.steps[-1]["loss"] = run.global_sum(step.local_loss)
            if step.last:
                self._report(run)

    def _report(self, run: Run) -> None:
        """Log what the mistake did, and keep it in the record."""
        name = mistake_of(run)
        assert name is not None
        limit = TOLERANCE[run.precision.name]
        lines = [
            f"--break {name}, on purpose",
            *textwrap.wrap(run.config.BREAKS[name], 116),
            f"step{'loss':>12}{'one device':>14}{'apart':>10}   gradients",
        ]
        shows = []  # where the mistake shows, the first place first
        for number, step in enumerate(self.steps):
            loss_difference = relative_error(step["loss"], step["expected"])
            gradients = step["gradients"]
            wrong = [name for name, difference in gradients.items() if not difference <= limit]  # NaN is wrong as well
            text = f"{worst(gradients.values()):.1e} apart"
            if not loss_difference <= limit:
                shows.append(f"the loss of step {number}")
            if wrong:
                shows.append(f"the gradients of step {number} ({wrong[0]})")
                count = f"wrong in {len(wrong)} of {len(gradients)} parameters"
                text = f"{gradients[wrong[0]]:.1e} apart in {wrong[0]}, and {count}"
            lines.append(f"{number:<4}{step['loss']:>12.6f}{step['expected']:>14.6f}{loss_difference:>10.1e}   {text}")
        if shows:
            lines.append(f"It shows first in {', then in '.join(shows[:2])}.")
        else:
            lines.append(f"It does not show in {len(self.steps)} steps on the layout {run.layout}.")
        run.log.info("%s", "\n".join(lines), stacklevel=4)  # of the program's loop
        run.describe(broken={"name": name, "steps": self.steps})

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and mistake_of(run) is not None:
            dist.barrier()  # rank 0 has written its record before an exit code ends the run
            raise SystemExit(EXIT)  # on every rank, whatever it found


@torch.no_grad()
def gradient_difference(gradient: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference over the largest element of `expected`. A collective of the ranks that share it."""
    if gradient is None:
        return 0.0 if expected is None else math.inf
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    if expected is None:  # one device did not use the parameter
        return math.inf if full.count_nonzero() else 0.0
    full = full.flatten()[: expected.numel()].view_as(expected)  # flat, and padded, where an example shards it by hand
    return float((full - expected).abs().max() / expected.abs().max())
