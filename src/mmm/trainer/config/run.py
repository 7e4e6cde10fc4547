"""The flags that examples and trainers share: where a program runs, for how long, and what it leaves (the group
``run``), how weights are updated (``optimizer``), and when the model is evaluated (``evaluation``).

A group is a dataclass, and a section of ``--help``; on the command line, and in a run's record, flags are flat:
`flags_of`. A script's own ``Config`` may inherit `BaseOptions`, `BatchOptions` or `RunOptions`, and is its group then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from torch import nn

from mmm.errors import ConfigError
from mmm.optim.adamw import make_optimizer
from mmm.runtime.ranks import LONGEST

Config = TypeVar("Config")
DEFAULT_MAX_ITERS = 50
LONGEST_NAME = 80  # characters, of a run
DEFAULT_BATCH_SIZE = 16  # samples a step, per data-parallel coordinate
# Flags that are not called as the field is, of a layout, of its techniques, or of a model's sizes.
FLAGS = {
    "tp": "tpsize",
    "data_parallel": "parallel",
    "checkpointing": "activation_checkpointing",
}


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Where it runs, and what it leaves."""

    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    outdir: Path | None = None
    """The run's own folder. Default: outputs/<module>/<name, or else the time>."""
    name: str | None = None
    """What the run is called, in `mmm runs` and in a tracker."""
    overwrite: bool = False
    """Replace a record that is already in --outdir."""
    flush_every: int = 10
    """Rows of history that a killed run may lose."""
    log_all_ranks: bool = False
    """Log from every rank, not just rank 0."""
    timeout: float = 600.0
    """Seconds that a collective may take before the run gives up."""

    def check(self) -> None:
        """Values that are wrong by themselves.

        Raises:
            ConfigError: the first of them.
        """
        if self.name is not None and not is_name(self.name):
            raise ConfigError(
                f"--name {self.name!r}: needed are 1 to {LONGEST_NAME} printable characters, no / or \\, no . ~ first"
            )
        if self.flush_every < 1:
            raise ConfigError(f"--flush_every {self.flush_every}: it must be at least 1")
        if not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"--timeout {self.timeout}: it must be greater than 0, and at most {LONGEST:.0e} s")


@dataclass(frozen=True, kw_only=True)
class SeededOptions(BaseOptions):
    """Where it runs, in which precision, and what it leaves."""

    seed: int = 0
    """Decides initial weights and the order of the data, on every mesh alike."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""

    def check(self) -> None:
        super().check()
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it must fit in 64 bits")


@dataclass(frozen=True, kw_only=True)
class BatchOptions(SeededOptions):
    """Where it runs, on how large batches, and what it leaves."""

    batch_size: int | None = None
    """Samples a step, per data-parallel coordinate. Default: 16, unless a preset or the text above says otherwise."""
    global_batch_size: int | None = None
    """Samples a step, over all ranks: keep it the same to compare meshes. Default: --batch_size on each coordinate."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(BatchOptions):
    """Where it runs, for how long, and what it leaves."""

    max_iters: int | None = None
    """End after this many optimizer steps, whatever --epochs says. With neither: 50, unless the text above says
    otherwise."""
    epochs: int | None = None
    """End after this many passes over the data. Default: none, unless the text above says otherwise."""
    plots: bool = True
    """Draw the run's summary at the end, in the terminal and in the run's folder."""
    summary: bool = False
    """Print the model's summary and leave."""

    def check(self) -> None:
        super().check()
        check_counts(max_iters=self.max_iters, epochs=self.epochs)

    def steps(self, steps_per_epoch: int, default: int = DEFAULT_MAX_ITERS) -> int:
        """Optimizer steps of the run.

        Args:
            default: where no flag says.
        """
        limits = [] if self.max_iters is None else [self.max_iters]
        limits += [] if self.epochs is None else [self.epochs * steps_per_epoch]
        return min(limits, default=default)


@dataclass(frozen=True, kw_only=True)
class RowOptions(StepOptions):
    """Where it runs, for how long, and what it leaves."""

    log_every: int = 1
    """Steps between two logged rows; a row's seconds and rates are means over the steps since the row before."""

    def check(self) -> None:
        super().check()
        check_counts(log_every=self.log_every)


@dataclass(frozen=True, kw_only=True)
class RunOptions(RowOptions):
    """What most scripts that train have."""

    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    compile: bool = False
    """torch.compile what is known to give right gradients on this layout."""

    def check(self) -> None:
        super().check()
        check_rate(self.lr)


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor parallelism."""

    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is sharded."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How weights are updated."""

    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        check_rate(self.lr)

    def make(self, parameters: Iterable[nn.Parameter], lr: float | None = None) -> torch.optim.Optimizer:
        """The optimizer of these parameters.

        Args:
            lr: None: as the flag says.
        """
        return make_optimizer(self.optimizer, parameters, self.lr if lr is None else lr)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """When the model is evaluated."""

    eval_every: int = 0
    """Steps between two evaluations; 0: at the end alone."""

    def check(self) -> None:
        """Raises ConfigError for a number that is too small."""
        check_counts(0, eval_every=self.eval_every)

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after this step of so many."""
        return step == steps - 1 or (self.eval_every > 0 and (step + 1) % self.eval_every == 0)


@dataclass(frozen=True, kw_only=True)
class ValidationOptions(EvaluationOptions):
    """How often to evaluate on the validation text, and on how much of it."""

    eval_every: int = 50
    """Steps between two validations, one more at the end; 0: at the end alone."""
    eval_batches: int = 4
    """Global batches in a validation."""

    def check(self) -> None:
        super().check()
        check_counts(eval_batches=self.eval_batches)


def is_name(name: str) -> bool:
    """Whether it can name a run, and its folder."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and not set(name) & set("/\\") and name[0] not in ".~ "


def run_options(config: Any) -> BaseOptions:
    """The flags of where a program runs: its config's group ``run``; of many a script the config itself."""
    options: BaseOptions = config if isinstance(config, BaseOptions) else config.run
    return options


def check_counts(least: int = 1, **flags: int | None) -> None:
    """Raises ConfigError for the first flag that was given a number below `least`, 0 or 1."""
    rule = "it must be at least 1" if least else "it must not be negative"
    for name, value in flags.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: {rule}")


def check_rate(lr: float) -> None:
    """Raises ConfigError for a learning rate that none is."""
    if not 0 < lr < math.inf:
        raise ConfigError(f"--lr {lr}: it must be greater than 0, and finite")


def check_effect(effective: bool, without: str, why: str, give: str, **flags: object) -> None:
    """Refuse flags that were given, and have no effect; those that were not are None.

    Args:
        effective: whether they have one.
        without: the flag that is missing, or differs.
        why: what is so without it.
        give: what to give for it.

    Raises:
        ConfigError: for the first of them.
    """
    for flag, value in flags.items():
        if value is not None and not effective:
            raise ConfigError(f"--{flag} {value} without {without}: {why}; leave --{flag} out, or give {give}")


def flag_fields(config: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Field and value of every flag, also of those in groups."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flag_fields(value)
        else:
            yield field, value


def flags_of(config: Any) -> dict[str, Any]:
    """The value of every flag, by its name."""
    return {field.name: value for field, value in flag_fields(config)}


def replace_flags(config: Config, **flags: Any) -> Config:
    """The config with other values of some flags. Raises TypeError for a name that is none of its flags."""
    if unknown := flags.keys() - flags_of(config).keys():
        raise TypeError(f"{type(config).__name__} has no flag {', '.join(sorted(unknown))}")
    changes: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            changes[field.name] = replace_flags(value, **{n: flags[n] for n in flags.keys() & flags_of(value).keys()})
        elif field.name in flags:
            changes[field.name] = flags[field.name]
    return replace(config, **changes)  # type: ignore[type-var]
