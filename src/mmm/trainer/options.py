"""The command line, as dataclasses: a program's ``Config`` inherits what it needs, and tyro makes the flags.

From options to what a run needs goes one way: `values_of` says what the flags say of a `Layout` and of `Techniques`.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from mmm.errors import ConfigError
from mmm.layout import Layout, Techniques
from mmm.runtime.failure import print_once
from mmm.runtime.ranks import DRY_RUN, LONGEST, command_line, whoami
from mmm.trainer.dry_run import follow_alias, for_a_few_steps
from mmm.trainer.flags import FLAGS

T = TypeVar("T")
Options = TypeVar("Options", bound="BaseOptions")


# A flag that a program inherits and has no use for: not in --help, and an error on the command line.
Unused = Annotated[T, tyro.conf.Suppress, tyro.conf.Fixed]


def values_of(options: Any, kind: type) -> dict[str, Any]:
    """What options say of the fields of a dataclass. Missing: those that the program has no flag for, or that are None.

    Args:
        kind: `Layout` or `Techniques`.
    """
    given = {field.name: getattr(options, FLAGS.get(field.name, field.name), None) for field in fields(kind)}
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Need:
    """What a flag needs to have an effect.

    A class of options has a table ``NEEDS``, flag → `Need`. A flag in it has None for its default, so that it is known
    whether it was given.

    Attributes:
        met: (options, fitted layout) → whether it is there.
        without: the flag that is missing, or differs. why: what is so without it. give: what to give for it.
    """

    met: Callable[[Any, Layout], bool]
    without: str
    why: str
    give: str


PIPELINE = Need(lambda options, layout: layout.pp > 1, "--pp", "there is one stage, the model", "--pp 2")
SHARDED_SEQUENCE = Need(lambda options, layout: layout.cp > 1, "--cp", "no sequence is sharded", "--cp 2")
EXPERTS = Need(lambda options, layout: options.n_experts > 0, "--n_experts", "there are no experts", "--n_experts 8")


def check_needs(options: Any, layout: Layout) -> None:
    """Raises ConfigError for the first flag that was given, and has no effect."""
    for owner in reversed(type(options).__mro__):
        for flag, need in vars(owner).get("NEEDS", {}).items():
            value = getattr(options, flag)
            if value is not None and not need.met(options, layout):
                raise ConfigError(
                    f"--{flag} {value} without {need.without}: {need.why}; leave --{flag} out, or give {need.give}"
                )


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Flags that every runnable program has: where it runs, and where it writes."""

    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    outdir: Path | None = None
    """The run's own folder. Default: outputs/<module>/<time>."""
    overwrite: bool = False
    """Replace a record that is already in --outdir."""
    flush_every: int = 10
    """Rows of history that a killed run may lose."""
    log_all_ranks: bool = False
    """Log from every rank, not just rank 0."""
    timeout: float = 600.0
    """Seconds that a collective may take before the run gives up."""

    # What a program that has no such flag goes by.
    seed = 0
    dtype = "auto"
    lr = 0.0
    log_every = 1
    plots = False
    break_ = None
    save_model = False
    checkpoint_every = None
    replica = None
    resume = None
    tracker = None
    RUNS_ON_MPS: ClassVar = False

    @classmethod
    def defaults(cls, words: Sequence[str]) -> dict[str, Any]:
        """Defaults of flags that follow from others of a command line."""
        return {}

    def check(self) -> None:
        """Values that are wrong by themselves.

        Raises:
            ConfigError: the first of them.
        """
        if self.flush_every < 1:
            raise ConfigError(f"--flush_every {self.flush_every}: it must be at least 1")
        if not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"--timeout {self.timeout}: it must be greater than 0, and at most {LONGEST:.0e} s")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: it must fit in 64 bits")


@dataclass(frozen=True, kw_only=True)
class BatchOptions(BaseOptions):
    """Flags of whatever makes steps on batches."""

    batch_size: int | None = None
    """Samples a step, per data-parallel coordinate."""
    global_batch_size: int | None = None
    """Samples a step, over all ranks: keep it the same to compare meshes."""
    seed: int = 0
    """Decides initial weights and the order of the data, on every mesh alike."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(BatchOptions):
    """Flags that every example and trainer that trains has."""

    default_max_iters: ClassVar[int] = 50
    default_batch_size: ClassVar[int] = 16  # samples a step, per data-parallel coordinate
    max_iters: int | None = None
    """End after this many optimizer steps, whatever --epochs says. With neither: 50, unless the text above says
    otherwise."""
    epochs: int | None = None
    """End after this many passes over the data."""
    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    compile: bool = False
    """torch.compile what is known to give right gradients on this layout."""
    log_every: int = 1
    """Steps between two logged rows."""
    plots: bool = True
    """Draw the history at the end: pictures in the run's folder, and the loss in the terminal."""
    summary: bool = False
    """Print the model's summary and leave."""

    def check(self) -> None:
        super().check()
        for name in ("max_iters", "epochs", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value}: it must be at least 1")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr}: it must be greater than 0, and finite")

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the run."""
        limits = [] if self.max_iters is None else [self.max_iters]
        limits += [] if self.epochs is None else [self.epochs * steps_per_epoch]
        return min(limits, default=self.default_max_iters)

    def axes(self, ranks: int) -> dict[str, int]:
        """Sizes of the axes that the program has flags for, on so many ranks."""
        return values_of(self, Layout)

    def layout(self, ranks: int) -> Layout:
        """The mesh for that many ranks.

        Raises:
            LayoutError: the sizes do not multiply to it.
            ConfigError: a flag that has no effect on it (`Need`).
        """
        layout = Layout(**self.axes(ranks)).fit(ranks)
        check_needs(self, layout)
        return layout

    def techniques(self) -> Techniques:
        """The techniques that the program has flags for; the others are as `Techniques` has them."""
        return Techniques(**values_of(self, Techniques))


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor parallelism."""

    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is sharded."""


@dataclass(frozen=True, kw_only=True)
class BreakOptions(BaseOptions):
    """The flag of an example that can show a mistake (`mmm.examples._support.mistakes`)."""

    BREAKS: ClassVar[dict[str, str]] = {}  # name → what is broken, in one sentence, and why that is wrong
    break_: Annotated[str | None, tyro.conf.arg(name="break", metavar="NAME")] = None  # type: ignore[assignment]
    """Make one of the mistakes named above, show how far loss and gradients then are from those of one device, and end
    with exit code 1."""

    def check(self) -> None:
        super().check()
        if self.break_ is not None and self.break_ not in self.BREAKS:
            raise ConfigError(f"--break {self.break_}: it is one of {', '.join(self.BREAKS)}")


def parse(config: type[Options], doc: str | None = None) -> Options:
    """The command line as a `config`, checked. ``--help`` prints and leaves; so does a wrong flag, with the near miss
    and exit code 2. Either is printed once for the run.

    In a dry run the options are those of a few steps. With ``--dry_run`` this does not return: ``mmm dry-run`` runs
    instead.

    Raises:
        ConfigError: of `check`; or a flag whose value is empty, as of a shell's variable that is not set: a path would
            be the current folder.
    """
    for before, value in pairwise(["", *sys.argv[1:]]):
        flag = value[:-1] if value.startswith("--") and value.endswith("=") else before
        if flag.startswith("--") and value in ("", f"{flag}="):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave {flag} out")
    if not hasattr(config, "dry_run"):
        follow_alias()
    if breaks := getattr(config, "BREAKS", {}):
        doc = f"{doc}\n--break NAME makes a mistake:\n\n" + "\n".join(
            f"  {name}: {why}" for name, why in breaks.items()
        )
    program = shlex.join(command_line()[: -len(sys.argv[1:]) or None])
    given: dict[str, Any] = {"prog": program, "description": doc, "use_underscores": True}
    if found := config.defaults(sys.argv[1:]):
        given["default"] = config(**found)
    with print_once():
        options = tyro.cli(config, **given)
    options.check()
    return for_a_few_steps(options) if whoami().source == DRY_RUN else options
