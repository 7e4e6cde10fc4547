"""The flags that every program may have, and how flags in general are read from a config.

A program's ``Config`` is a frozen dataclass. Its fields are flags, or groups of flags: frozen dataclasses as well, each
a section of ``--help``. On the command line, and in a run's record, flags are flat (`flags_of`). A program gives each
group its own defaults. Class attributes say where a program differs from its groups:

- ``LEFT_OUT``: flags of its groups that have no effect in it. ``--help`` hides them, and the command line refuses them.
- ``CHOICES``: flags for which it takes other choices than its groups do.
- ``UNLISTED``: flags that few need. ``--help`` hides them; the command line and ``--config FILE`` take them.

A text in ``Annotated`` is another name of the flag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from mmm.errors import ConfigError
from mmm.runtime.ranks import LONGEST

Config = TypeVar("Config")
# Samples per step on each data-parallel coordinate, and number of steps, if neither a flag nor a preset says so.
DEFAULT_BATCH_SIZE = 16
DEFAULT_MAX_ITERS = 50
# A run's name.
NAME = re.compile(r"[^/\\.~][^/\\]{0,79}")
# Fields of a layout, of its techniques or of a model's sizes whose flag has another name.
FLAGS = {
    "tp": "tpsize",
    "data_parallel": "parallel",
    "checkpointing": "activation_checkpointing",
}


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Where the program runs, with how large batches, and what it leaves."""

    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto: bf16 mixed precision on an accelerator that computes in it, else fp32."""
    seed: int = 0
    """Decides initial weights and the order of the data, on every mesh alike."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time, so that two runs on one layout have equal bits. What has
    no such algorithm is refused. Some operations are slower."""
    batch_size: int | None = None
    """Samples per step on each data-parallel coordinate. Default: 16, unless a preset or the text above says so."""
    global_batch_size: int | None = None
    """Samples per step over all ranks; keep it the same to compare meshes. Default: --batch_size on each coordinate."""
    log_every: int = 1
    """Steps between two logged rows; a row's seconds and rates are means over the steps since the previous row."""
    outdir: Path | None = None
    """The run's own folder. Default: outputs/<module>/<name, or else the time>."""
    name: str | None = None
    """What the run is called, in `mmm runs` and in a tracker."""
    overwrite: bool = False
    """Replace a record that is already in --outdir."""
    flush_every: int = 10
    """Rows of history that a killed run may lose."""
    tracker: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """Rows go there as well, in the run's folder. wandb is offline, and mlflow a file, unless WANDB_MODE or
    MLFLOW_TRACKING_URI says otherwise. WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME name the project; default: mmm."""
    plots: bool = False
    """Draw a summary of the run at the end, in the terminal and in the run's folder."""
    verbose: bool = False
    """Print details too: the table of ranks, the model layer by layer, what the columns of a row mean. The run's
    log.txt always has them."""
    log_all_ranks: bool = False
    """Log from every rank, not just rank 0."""
    own_work: bool = False
    """Time how long each rank waits for the others: dt_own, by which `mmm history --ranks` names the slowest. PyTorch's
    functions that wait are replaced while the run lasts."""
    timeout: float = 600.0
    """Seconds that a collective may take before the run gives up."""

    def check(self) -> None:
        """Raises ConfigError for the first value that is wrong by itself."""
        # A folder has this name: it must not be in another one, hidden, or a home.
        if self.name is not None and not (NAME.fullmatch(self.name) and self.name.isprintable()):
            raise ConfigError(
                f"--name {self.name!r}: needed are 1 to 80 printable characters, no / or \\, no . ~ first"
            )
        check_counts(flush_every=self.flush_every, log_every=self.log_every)
        # NaN is refused as well: each rule says what a value has to be.
        if not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"--timeout {self.timeout}: it must be greater than 0, and at most {LONGEST:.0e} s")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it must fit in 64 bits")


@dataclass(frozen=True, kw_only=True)
class Duration:
    """How long the program trains."""

    max_iters: int | None = None
    """End after this many optimizer steps, whatever --epochs says. With neither: 50, unless the text above says
    otherwise."""
    epochs: int | None = None
    """End after this many passes over the data. Default: none, unless the text above says otherwise."""

    def check(self) -> None:
        """Raises ConfigError for a number below 1."""
        check_counts(max_iters=self.max_iters, epochs=self.epochs)

    def steps(self, steps_per_epoch: int, default: int = DEFAULT_MAX_ITERS) -> int:
        """Number of optimizer steps of the run.

        Args:
            steps_per_epoch: number of steps in one pass over the data.
            default: number of steps if no flag says so.
        """
        # The smaller of the two counts.
        limits = []
        if self.max_iters is not None:
            limits.append(self.max_iters)
        if self.epochs is not None:
            limits.append(self.epochs * steps_per_epoch)
        return min(limits, default=default)


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """What the run saves, and what it resumes from."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints, checkpoints/step-N of the run's folder; one more at the end. Default: none."""
    keep: int | None = None
    """With --checkpoint_every, how many of the newest stay. Default: 2."""
    checkpoint_mode: Literal["async", "blocking"] | None = None
    """With --checkpoint_every. async: training continues while a checkpoint is written, so a kill may go back to the
    one before that. blocking: training waits, and a kill loses at most one interval. Default: async."""
    resume: Path | None = None
    """Resume from a checkpoint, on any layout: a run's folder, one of its checkpoints/step-N, or auto: the newest whole
    one in --outdir, in the same record; from the beginning if there is none yet."""

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


def check_resume(checkpoint: CheckpointFlags, run: RunFlags) -> None:
    """Raises ConfigError if --resume contradicts --overwrite or --outdir."""
    if checkpoint.resume is not None and run.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other: leave one out")
    # `auto` looks into --outdir, which by default is a new folder.
    if checkpoint.resume == Path("auto") and run.outdir is None:
        raise ConfigError("--resume auto without --outdir: each run then has a folder of its own; give --outdir")


def check_counts(least: int = 1, **flags: int | None) -> None:
    """Raises ConfigError for the first flag that was given a number below `least`, 0 or 1."""
    rule = "it must be at least 1" if least else "it must not be negative"
    for name, value in flags.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: {rule}")


def check_effect(
    effective: bool,
    without: str,
    why: str,
    give: str,
    **flags: object,
) -> None:
    """Refuse flags that were given and have no effect.

    The sentence is made of them all: ``--keep 3 without --checkpoint_every: nothing is saved; leave --keep out, or give
    --checkpoint_every 100``. Here `without` is ``--checkpoint_every``, `why` ``nothing is saved``, and `give`
    ``--checkpoint_every 100``.

    Args:
        effective: whether they have an effect.
        without: the flag that is missing, or has another value.
        why: what is the case without it.
        give: what to give to make them effective.
        flags: values of the flags, by name; None for a flag that was not given.

    Raises:
        ConfigError: for the first flag that was given.
    """
    for flag, value in flags.items():
        if value is not None and not effective:
            raise ConfigError(f"--{flag} {value} without {without}: {why}; leave --{flag} out, or give {give}")


def groups_of(config: Any) -> dict[str, Any]:
    """The config itself, below an empty name, and its groups by the names of their fields."""
    groups = {name: group for name, group in vars(config).items() if is_dataclass(group)}
    return {"": config, **groups}


def flags_of(config: Any) -> dict[str, Any]:
    """The value of every flag, by its name: the config's own, then those of its groups that have an effect."""
    left_out = getattr(config, "LEFT_OUT", ())
    values = {}
    for group in groups_of(config).values():
        for name, value in vars(group).items():
            if not is_dataclass(value) and name not in left_out:
                values[name] = value
    return values


def replace_flags(config: Config, /, **flags: Any) -> Config:
    """The config with other values of some flags. Raises TypeError for a name that is not one of its flags."""
    unknown = flags.keys() - flags_of(config).keys()
    if unknown:
        raise TypeError(f"{type(config).__name__} has no flag {', '.join(sorted(unknown))}")

    def changed(group: Any) -> Any:
        return replace(group, **{name: flags[name] for name in flags.keys() & vars(group).keys()})

    groups = {name: changed(group) for name, group in groups_of(config).items() if name}
    # They come last, because a group may have the name of a flag in it.
    return replace(changed(config), **groups)


def run_flags(config: Any) -> RunFlags:
    """The group ``run`` of a program's flags, or the config itself. Raises ConfigError if that is no `RunFlags`."""
    flags = getattr(config, "run", config)
    if not isinstance(flags, RunFlags):
        raise ConfigError(
            f"start_run: the config is of the class {type(config).__name__}: it takes RunFlags(…), or an instance of a "
            "frozen dataclass with a field run: RunFlags"
        )
    return flags


def checkpoint_options(config: Any) -> CheckpointFlags | None:
    """The group of a program's flags that is a `CheckpointFlags`, or the config itself. None if there is none."""
    # What has no attributes, such as a dict, is refused where the run's own flags are read.
    for group in (config, *getattr(config, "__dict__", {}).values()):
        if isinstance(group, CheckpointFlags):
            return group
    return None
