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
from mmm.history.trackers import check_tracker
from mmm.layout import Layout, Techniques
from mmm.runtime.failure import said_once
from mmm.runtime.ranks import DRY_RUN, LONGEST, command_line, whoami
from mmm.trainer.dry_run import follow_alias, for_a_few_steps
from mmm.trainer.flags import FLAGS
from mmm.trainer.profile_options import ProfileOptions

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


SAVES = Need(
    lambda options, layout: options.checkpoint_every is not None,
    "--checkpoint_every",
    "nothing is saved",
    "--checkpoint_every 100",
)


WSD = Need(
    lambda options, layout: options.lr_schedule == "wsd",
    "--lr_schedule wsd",
    "the learning rate falls all along",
    "--lr_schedule wsd",
)


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
class BreakOptions(BaseOptions):
    """The flag of an example that can show a mistake (`mmm.trainer.mistakes`)."""

    BREAKS: ClassVar[dict[str, str]] = {}  # name → what is broken, in one sentence, and why that is wrong
    break_: Annotated[str | None, tyro.conf.arg(name="break", metavar="NAME")] = None  # type: ignore[assignment]
    """Make one of the mistakes named above, show how far loss and gradients then are from those of one device, and end
    with exit code 1."""

    def check(self) -> None:
        super().check()
        if self.break_ is not None and self.break_ not in self.BREAKS:
            raise ConfigError(f"--break {self.break_}: it is one of {', '.join(self.BREAKS)}")


@dataclass(frozen=True, kw_only=True)
class LoopOptions(ProfileOptions, RunOptions):
    """Flags of the shared training loop, on top of every run's, whatever it trains."""

    # fp16 takes the loss scale of the loop.
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"  # type: ignore[assignment]
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""
    max_norm: float = 0.0
    """Clip the gradient's norm to this; 0 leaves it."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Of a step with a loss or gradient that is not finite. stop: it ends the run. skip: all ranks leave weights and
    optimizer as they are, and go on."""
    tracker: Literal["csv", "tensorboard", "wandb", "mlflow"] | None = None  # type: ignore[assignment]
    """Rows go there as well, in the run's folder. wandb is offline, and mlflow a folder, unless WANDB_MODE or
    MLFLOW_TRACKING_URI says otherwise."""
    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""
    checkpoint_every: int | None = None  # type: ignore[assignment]
    """Steps between two checkpoints, checkpoints/step-N of the run's folder; one more at the end. Default: none."""
    keep: int | None = None
    """With --checkpoint_every, how many of the newest stay. Default: 2."""
    keep_every: int | None = None
    """With --checkpoint_every, those of every so many steps stay as well."""
    checkpoint_mode: Literal["async", "blocking"] | None = None
    """With --checkpoint_every. async: training goes on while a checkpoint is written, so a kill may go back to the one
    before that. blocking: training waits, and a kill loses at most one interval. Default: async."""
    resume: Path | None = None  # type: ignore[assignment]
    """Go on from a checkpoint, on any layout: a run's folder, one of its checkpoints/step-N, or auto: the newest whole
    one in --outdir, in the same record; from the beginning where there is none yet."""
    replica: int | None = None  # type: ignore[assignment]
    """Steps between two copies of the run's state in the memory of its hosts, from which the ranks that are left go on
    (`launch --elastic`, and on one host `launch --retries`). Default: none."""
    NEEDS: ClassVar[dict[str, Need]] = {
        "keep": SAVES,
        "keep_every": SAVES,
        "checkpoint_mode": SAVES,
        "replica": SAVES,
    }

    def check(self) -> None:
        super().check()
        check_tracker(self.tracker)
        self.check_profile()
        for name in ("checkpoint_every", "keep", "keep_every", "replica"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name} {value}: it must be at least 1")
        if self.resume is not None and self.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other: leave one out")
        if self.resume == Path("auto") and self.outdir is None:
            raise ConfigError("--resume auto without --outdir: each run then has a folder of its own; give --outdir")
        if not 0 <= self.max_norm < math.inf:
            raise ConfigError(
                f"--max_norm {self.max_norm}: it must be a number from 0 on, and finite; 0 leaves the gradient as it is"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LoopOptions):
    """Flags of the shared training loop for a deep model that is trained step by step."""

    NEEDS: ClassVar[dict[str, Need]] = {"decay": WSD}
    warmup: int = 0
    """Steps over which the learning rate rises; then --lr_schedule."""
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up. cosine: falls as half a cosine. wsd: stays, and falls in a line over --decay steps."""
    decay: int | None = None
    """With --lr_schedule wsd, the last steps, over which the learning rate falls. Default: a fifth of the run."""
    weight_decay: float | None = None
    """Part of a weight that AdamW takes off a step, times the learning rate. Default: PyTorch's, 0.01."""
    decayed: Literal["all", "matrices"] = "all"
    """What that is taken off. matrices: not off norms and biases, which have one dim."""
    eval_every: int = 0
    """Steps between two evaluations; 0: at the end alone."""

    def check(self) -> None:
        super().check()
        for name in ("warmup", "eval_every", "decay"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: it must not be negative")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight_decay {self.weight_decay}: it must be a number from 0 on, and finite")
        for name, value in (("weight_decay", self.weight_decay), ("decayed", self.decayed)):
            if self.optimizer == "sgd" and value not in (None, "all"):
                raise ConfigError(f"--{name} {value} with --optimizer sgd, which has no weight decay: leave it out")


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
    with said_once():
        options = tyro.cli(config, **given)
    options.check()
    return for_a_few_steps(options) if whoami().source == DRY_RUN else options
