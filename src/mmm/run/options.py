"""The flags that every program may have, and how flags in general are found in a config.

A program's ``Config`` is a frozen dataclass. Its fields are flags, or groups of flags: frozen dataclasses as well, each
a section of ``--help``. On the command line, and in a run's record, flags are flat (`flags_of`). A program gives each
group its own defaults. Class attributes say where it differs from its groups:

- ``LEFT_OUT``: flags of its groups that have no effect in it. ``--help`` hides them, and the command line refuses them.
- ``CHOICES``: flags of which it takes other choices than its groups do.
- ``UNLISTED``: flags that few need. ``--help`` hides them; the command line and ``--config FILE`` take them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from mmm.errors import ConfigError
from mmm.runtime.ranks import LONGEST

Config = TypeVar("Config")
DEFAULT_MAX_ITERS = 50
LONGEST_NAME = 80  # characters, of a run
# Flags that are not called as the field is, of a layout, of its techniques, or of a model's sizes.
FLAGS = {
    "tp": "tpsize",
    "data_parallel": "parallel",
    "checkpointing": "activation_checkpointing",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where it runs, on how large batches, and what it leaves."""

    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""
    seed: int = 0
    """Decides initial weights and the order of the data, on every mesh alike."""
    batch_size: int | None = None
    """Samples a step, per data-parallel coordinate. Default: 16, unless a preset or the text above says otherwise."""
    global_batch_size: int | None = None
    """Samples a step, over all ranks: keep it the same to compare meshes. Default: --batch_size on each coordinate."""
    log_every: int = 1
    """Steps between two logged rows; a row's seconds and rates are means over the steps since the row before."""
    outdir: Path | None = None
    """The run's own folder. Default: outputs/<module>/<name, or else the time>."""
    name: str | None = None
    """What the run is called, in `mmm runs` and in a tracker."""
    overwrite: bool = False
    """Replace a record that is already in --outdir."""
    flush_every: int = 10
    """Rows of history that a killed run may lose."""
    plots: bool = False
    """Draw the run's summary at the end, in the terminal and in the run's folder."""
    verbose: bool = False
    """Print details too: the table of ranks, the model layer by layer, what the columns of a row mean. The run's
    log.txt always has them."""
    log_all_ranks: bool = False
    """Log from every rank, not just rank 0."""
    timeout: float = 600.0
    """Seconds that a collective may take before the run gives up."""

    def check(self) -> None:
        """Raises ConfigError for the first value that is wrong by itself."""
        if self.name is not None and not is_name(self.name):
            raise ConfigError(
                f"--name {self.name!r}: needed are 1 to {LONGEST_NAME} printable characters, no / or \\, no . ~ first"
            )
        check_counts(flush_every=self.flush_every, log_every=self.log_every)
        if not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"--timeout {self.timeout}: it must be greater than 0, and at most {LONGEST:.0e} s")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it must fit in 64 bits")


@dataclass(frozen=True, kw_only=True)
class Duration:
    """For how long it trains."""

    max_iters: int | None = None
    """End after this many optimizer steps, whatever --epochs says. With neither: 50, unless the text above says
    otherwise."""
    epochs: int | None = None
    """End after this many passes over the data. Default: none, unless the text above says otherwise."""

    def check(self) -> None:
        """Raises ConfigError for a number below 1."""
        check_counts(max_iters=self.max_iters, epochs=self.epochs)

    def steps(self, steps_per_epoch: int, default: int = DEFAULT_MAX_ITERS) -> int:
        """Optimizer steps of the run.

        Args:
            default: where no flag says.
        """
        limits = []
        if self.max_iters is not None:
            limits.append(self.max_iters)
        if self.epochs is not None:
            limits.append(self.epochs * steps_per_epoch)
        return min(limits, default=default)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What the run saves, and what it goes on from."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints, checkpoints/step-N of the run's folder; one more at the end. Default: none."""
    keep: int | None = None
    """With --checkpoint_every, how many of the newest stay. Default: 2."""
    checkpoint_mode: Literal["async", "blocking"] | None = None
    """With --checkpoint_every. async: training goes on while a checkpoint is written, so a kill may go back to the one
    before that. blocking: training waits, and a kill loses at most one interval. Default: async."""
    resume: Path | None = None
    """Go on from a checkpoint, on any layout: a run's folder, one of its checkpoints/step-N, or auto: the newest whole
    one in --outdir, in the same record; from the beginning where there is none yet."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        check_counts(checkpoint_every=self.checkpoint_every, keep=self.keep)
        check_effect(
            self.checkpoint_every is not None,
            "--checkpoint_every",
            "nothing is saved",
            "--checkpoint_every 100",
            keep=self.keep,
            checkpoint_mode=self.checkpoint_mode,
        )


def check_resume(checkpoint: Checkpoint, run: Run) -> None:
    """--resume beside --overwrite and --outdir. Raises ConfigError where they contradict each other."""
    if checkpoint.resume is not None and run.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: leave one out")
    if checkpoint.resume == Path("auto") and run.outdir is None:
        raise ConfigError("--resume auto without --outdir: each run then has a folder of its own; give --outdir")


def is_name(name: str) -> bool:
    """Whether it can name a run, and its folder."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and not set(name) & set("/\\") and name[0] not in ".~ "


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
    """Field and value of every flag, also of those in groups, but for those that have no effect."""
    left_out = getattr(config, "LEFT_OUT", ())
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            for inner, inner_value in flag_fields(value):
                if inner.name not in left_out:
                    yield inner, inner_value
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
            of_group = {name: flags[name] for name in flags.keys() & flags_of(value).keys()}
            changes[field.name] = replace_flags(value, **of_group)
        elif field.name in flags:
            changes[field.name] = flags[field.name]
    return replace(config, **changes)  # type: ignore[type-var]


def checkpoint_options(config: Any) -> Checkpoint | None:
    """The flags of checkpoints of a program: one of its groups. None where it has none."""
    if config is None:
        return None
    return next((group for group in (config, *vars(config).values()) if isinstance(group, Checkpoint)), None)


def parse_steps(text: str) -> range:
    """The steps of ``FROM:TO``, TO not among them. Raises ConfigError where it is not that."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"--profile_steps {text}: give FROM:TO, such as 10:13 for the steps 10, 11 and 12")
    return range(int(first), int(end))
