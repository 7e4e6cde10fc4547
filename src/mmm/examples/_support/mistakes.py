"""Compares a run with a mistake in it (``--break NAME``) with the same steps on one device.

Each rank computes the first `STEPS` steps once more: the full model, from the same weights, on the whole global batch.
At each step of the optimizer it compares the ranks' gradients with its own, and after the step the losses.
"""

from __future__ import annotations

import copy
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.comparison import relative_error, worst
from mmm.data import Batch
from mmm.errors import ConfigError
from mmm.nn.init import canonical_name, convert
from mmm.parallel.initial_weights import draw_weights
from mmm.parallel.loss import cross_entropy
from mmm.run import command_line
from mmm.run.hook import Hook
from mmm.run.options import flags_of, replace_flags
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.runtime.ranks import whoami
from mmm_launch.contract import report

Config = TypeVar("Config")
# Makes the whole global batch of a step.
GlobalBatch = Callable[[Run, int], Batch]

STEPS = 3
EXIT = 1
# Relative differences that are allowed on another mesh, where sums are added up in another order.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-1, "fp16": 1e-1}


@dataclass(frozen=True, kw_only=True)
class BreakOptions:
    """The flag of an example that can make mistakes on purpose."""

    # Name → what is broken, in one sentence, and why that is wrong.
    BREAKS: ClassVar[dict[str, str]] = {}
    break_: str | None = None
    """Make one of the mistakes named above, show how far loss and gradients are from those of one device, and end with
    exit code 1."""

    def check(self) -> None:
        """Raises ConfigError for a mistake that the example does not have."""
        if self.break_ is not None and self.break_ not in self.BREAKS:
            raise ConfigError(f"--break {self.break_}: it is one of {', '.join(self.BREAKS)}")


def parse(config: type[Config], doc: str | None = None) -> Config:
    """As `mmm.run.command_line.parse`; ``--help`` also lists the mistakes of the example."""
    if issubclass(config, BreakOptions):
        wrapper = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="    ")
        mistakes = [wrapper.fill(f"{name}: {why}") for name, why in config.BREAKS.items()]
        doc = "\n".join((doc or "", "--break NAME makes a mistake:", "", *mistakes))
    return command_line.parse(config, doc)


def main(train: Callable[[Config], bool | None], config: type[Config], doc: str | None) -> None:
    """Run an example as a command. It ends with exit code 1 if `train` returns False, because something is wrong.

    With ``--break``, the last line says that it is on purpose, and where the mistake shows first.
    """

    def program() -> None:
        own_config = parse(config, doc)
        try:
            if train(own_config) is False:
                sys.exit(EXIT)
        except SystemExit as error:
            mistake = flags_of(own_config).get("break_")
            # --summary ends with 0.
            if mistake is not None and error.code == EXIT:
                text = f"--break {mistake}: exit code {EXIT}, on purpose. {getattr(error, 'finding', '')}"
                # Where launch does not listen, one rank says it.
                if not report("exit", f"{text}\n", EXIT) and whoami().is_main:
                    print(text, file=sys.stderr)
            raise

    command_line.run_main(program)


def for_a_mistake(config: Config) -> Config:
    """The config; if ``--break`` was given, of a few steps, and without dropout, which one device would draw anew."""
    flags = flags_of(config)
    if flags.get("break_") is None:
        return config
    few: dict[str, Any] = {"max_iters": min(flags["max_iters"] or STEPS, STEPS), "dropout": False}
    return replace_flags(config, **{name: few[name] for name in few.keys() & flags.keys()})


def mistake_of(run: Run) -> str | None:
    """The mistake that --break asks for, or None."""
    if isinstance(run.config, BreakOptions):
        return run.config.break_
    return None


def global_text(run: Run, step: int) -> Batch:
    """The global batch of text of a step, on the run's device."""
    samples = run.job.global_batch_size
    # All samples, from the first one on.
    return run.job.data.train.batch(step, samples, 0, samples).to(run.device)


class Ended(SystemExit):
    """The end of a run with ``--break``.

    Attributes:
        finding: where the mistake shows first.
    """

    def __init__(self, finding: str) -> None:
        super().__init__(EXIT)
        self.finding = finding


class MistakeOnPurpose(Hook):
    """With ``--break``, makes each step of a run once more, on this rank's device. The run then ends with exit code 1.

    Args:
        global_batch: makes the whole global batch of a step, on the run's device.

    Attributes:
        steps: for each step the loss of the ranks, the loss of one device, and the difference of each parameter's
            gradient.
    """

    def __init__(self, global_batch: GlobalBatch) -> None:
        self.global_batch = global_batch
        self.model_on_meta: nn.Module | None = None
        self.steps: list[dict[str, Any]] = []
        self.finding = ""

    def before(self, run: Run) -> None:
        if mistake_of(run) is not None and run.job is not None:
            # A copy, because the program shards the model itself.
            self.model_on_meta = copy.deepcopy(run.job.model)

    def state(self, run: Run) -> None:
        """Draw the weights of the full model on this device, and make its optimizer, as a loop begins."""
        if self.model_on_meta is None:
            return
        self.steps = []
        self.model = copy.deepcopy(self.model_on_meta)
        convert(self.model, run.precision.storage)
        draw_weights(self.model, run.device, run.seed)
        ranks_optimizer = run.objects["optimizer"]
        lr = ranks_optimizer.param_groups[0]["lr"]
        self.optimizer = type(ranks_optimizer)(self.model.parameters(), lr=lr)
        # Before each step of the ranks' optimizer their gradients are complete, and still there.
        ranks_optimizer.register_step_pre_hook(lambda *_: self._step(run))

    def _step(self, run: Run) -> None:
        """Make a step on one device, and compare the ranks' gradients with its own. A collective of all ranks."""
        batch = self.global_batch(run, len(self.steps))
        with torch.autocast(run.device.type, run.precision.compute, enabled=run.precision.mixed):
            logits = self.model(batch.inputs)
        loss = cross_entropy(logits, batch.targets, batch.count)
        loss.backward()
        expected = {canonical_name(name): p.grad for name, p in self.model.named_parameters()}
        # The parameters that this rank has. With a pipeline each rank has those of its stages.
        differences = {}
        for module in run.objects.values():
            if isinstance(module, nn.Module):
                for full_name, p in module.named_parameters():
                    name = canonical_name(full_name)
                    differences[name] = gradient_difference(p.grad, expected[name])
        by_rank = run.comm.gather_everywhere(differences)
        largest = {}
        for name in expected:
            largest[name] = worst(local[name] for local in by_rank if name in local)
        self.steps.append({"expected": loss.item(), "gradients": largest})
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self, run: Run, step: Step) -> None:
        if self.model_on_meta is not None:
            self.steps[-1]["loss"] = run.global_sum(step.local_loss)
            if step.last:
                self._report(run)

    def _report(self, run: Run) -> None:
        """Log what the mistake did, and put it into the record."""
        name = mistake_of(run)
        assert name is not None
        limit = TOLERANCE[run.precision.name]
        lines = [
            f"--break {name}, on purpose",
            *textwrap.wrap(run.config.BREAKS[name], 116),
            f"step{'loss':>12}{'one device':>14}{'apart':>10}   gradients",
        ]
        # Where the mistake shows, in the order of the computation.
        shows = []
        for step_index, step in enumerate(self.steps):
            loss = step["loss"]
            expected = step["expected"]
            gradients = step["gradients"]
            loss_difference = relative_error(loss, expected)
            text = f"{worst(gradients.values()):.1e} apart"
            # These comparisons are written so that NaN is wrong as well.
            if not loss_difference <= limit:
                shows.append(f"the loss of step {step_index}")
            wrong = [parameter for parameter, difference in gradients.items() if not difference <= limit]
            if wrong:
                first = wrong[0]
                shows.append(f"the gradients of step {step_index} ({first})")
                count = f"wrong in {len(wrong)} of {len(gradients)} parameters"
                text = f"{gradients[first]:.1e} apart in {first}, and {count}"
            lines.append(f"{step_index:<4}{loss:>12.6f}{expected:>14.6f}{loss_difference:>10.1e}   {text}")
        self.finding = f"It does not show in {len(self.steps)} steps on the layout {run.layout}."
        if shows:
            self.finding = f"It shows first in {', then in '.join(shows[:2])}."
        # stacklevel: the line is logged as one of the program's loop.
        run.log.info("%s", "\n".join([*lines, self.finding]), stacklevel=4)
        run.describe(broken={"name": name, "steps": self.steps})

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None and mistake_of(run) is not None:
            # On every rank, whatever it has seen.
            raise Ended(self.finding)


@torch.no_grad()
def gradient_difference(gradient: Tensor | None, expected: Tensor | None) -> float:
    """Compare a gradient with one device's. A collective of the ranks that share the gradient.

    Args:
        gradient: the ranks' gradient, sharded or full; None if the parameter was not used.
        expected: one device's gradient, or None.

    Returns:
        The largest difference of an element, divided by the largest element of `expected`; inf if only one of the two
        is there.
    """
    if gradient is None:
        if expected is None:
            return 0.0
        return math.inf
    full = gradient
    if isinstance(gradient, DTensor):
        full = gradient.full_tensor()
    # One device did not use the parameter. The ranks may have a gradient of zeros.
    if expected is None:
        if full.count_nonzero():
            return math.inf
        return 0.0
    # Where an example shards a parameter by hand, its gradient is flat and padded at the end.
    full = full.flatten()[: expected.numel()].view_as(expected)
    return float((full - expected).abs().max() / expected.abs().max())
