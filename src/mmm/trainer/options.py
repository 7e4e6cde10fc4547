"""The command line, as dataclasses: an example's ``Config`` inherits what it needs, and tyro makes the flags."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from mmm.data import Corpus, RandomTokens, TextTokens, Tokens, read_text_files, standard_library
from mmm.data.text import BYTES
from mmm.errors import ConfigError
from mmm.models.transformer import PRESETS, TransformerConfig
from mmm.parallel.memory.offload import check_offload
from mmm.runtime.failure import said_once
from mmm.runtime.ranks import LONGEST, command_line
from mmm.trainer.needs import EXPERTS, Need

T = TypeVar("T")


# A flag that a program inherits and has no use for: not in --help, and an error on the command line.
Unused = Annotated[T, tyro.conf.Suppress, tyro.conf.Fixed]


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
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """auto: bf16 mixed precision on an accelerator that computes in it; on a CPU, and else, fp32."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(BatchOptions):
    """Flags that every example and trainer that trains has."""

    default_max_iters: ClassVar[int] = 50
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
class LoopOptions(RunOptions):
    """Flags of the shared training loop, on top of every run's, whatever it trains."""

    max_norm: float = 0.0
    """Cut the gradient's norm down to this; 0 leaves it."""
    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""

    def check(self) -> None:
        super().check()
        if not 0 <= self.max_norm < math.inf:
            raise ConfigError(
                f"--max_norm {self.max_norm}: it must be a number from 0 on, and finite; 0 leaves the gradient as it is"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LoopOptions):
    """Flags of the shared training loop for a deep model that is trained step by step."""

    warmup: int = 0
    """Steps over which the learning rate rises; then it falls as half a cosine."""
    eval_every: int = 0
    """Steps between two evaluations; 0: at the end alone."""

    def check(self) -> None:
        super().check()
        for name in ("warmup", "eval_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: it must not be negative")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Flags of what is too large for one device: worked out piece by piece, or kept on the host."""

    loss_chunks: int = 1
    """Chunks of the sequence that logits and loss are worked out in: the whole logits never exist."""
    tile: int = 1
    """Tiles of the sequence that each MLP is worked out in, once more in backward: 1 / tile of its activations."""
    offload: bool = False
    """Keep a rank's part of parameters, gradients and optimizer state on the host, and update it there."""

    def check_memory(self, tokens: int, dtype: str) -> None:
        """Whether there are as many tokens as pieces, and offload goes with the dtype.

        Args:
            tokens: of a sequence, on one rank.

        Raises:
            ConfigError: fewer than one piece, or more than tokens; a dtype that does not go.
        """
        for name in ("loss_chunks", "tile"):
            if not 1 <= (value := getattr(self, name)) <= tokens:
                raise ConfigError(
                    f"--{name} {value}: it must be at least 1, and at most the {tokens} tokens of a "
                    f"sequence that a rank has"
                )
        if self.offload:
            check_offload("fsdp", dtype)

    def memory(self) -> dict[str, Any]:
        """What ``parallel.apply`` takes of them."""
        return {"loss_chunks": self.loss_chunks, "tile": self.tile, "offload": self.offload}


Preset = Literal["debug", "small", "reference", "medium", "llama2-7b", "llama-8b", "llama-70b"]


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """Flags of a Transformer's sizes: a preset, and what differs from it."""

    preset: Preset = "small"
    """Sizes to start from; the flags below change single ones."""
    n_layers: int | None = None
    dim: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    ffn_dim: int | None = None
    vocab_size: int | None = None

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """The sizes asked for.

        Args:
            default_vocab: vocabulary of the data, where ``--vocab_size`` is not given; None for the preset's.
        """
        changed = {f.name: getattr(self, f.name) for f in fields(TransformerOptions) if f.name != "preset"}
        changed = {name: value for name, value in changed.items() if value is not None}
        if default_vocab is not None:
            changed.setdefault("vocab_size", default_vocab)
        preset = PRESETS[self.preset]
        if "dim" in changed and "ffn_dim" not in changed:
            changed["ffn_dim"] = None  # follows dim
        return replace(preset, **changed)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(TransformerOptions):
    """Flags of a Transformer that may have routed experts."""

    NEEDS: ClassVar[dict[str, Need]] = {"top_k": EXPERTS, "expert_dim": EXPERTS, "balance_rate": EXPERTS}
    n_experts: int = 0
    """Experts in each layer; 0: one feed-forward network instead."""
    top_k: int | None = None
    """Experts that each token goes through. Default: 2, or the only one."""
    expert_dim: int | None = None
    """Width of one expert. Default: that of the preset's feed-forward layer."""
    balance_rate: float | None = None
    """How far a step moves the bias of an expert that had more, or less, than the mean load; 0: never. Default: 0.01;
    runs of many thousand steps take less: 0.001."""

    def balance(self) -> float:
        """`balance_rate`, or what stands for it."""
        return 0.01 if self.balance_rate is None else self.balance_rate

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """As `TransformerOptions.model_config`.

        Raises:
            ConfigError: a number of experts, or a rate, below 0.
        """
        if self.n_experts < 0:
            raise ConfigError(f"--n_experts {self.n_experts}: it must not be negative")
        if not 0 <= self.balance() < math.inf:
            raise ConfigError(f"--balance_rate {self.balance_rate}: it must be a number from 0 on, and finite")
        dense = super().model_config(default_vocab)
        if not self.n_experts:
            return dense
        top_k = min(2, self.n_experts) if self.top_k is None else self.top_k
        return replace(dense, n_experts=self.n_experts, top_k=top_k, expert_dim=self.expert_dim)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Flags of where tokens come from."""

    dataset: Literal["text", "random"] = "text"
    """text: the Python standard library's source, byte by byte (or --text). random: uniform tokens, to time."""
    text: tuple[Path, ...] = ()
    """Files to train on instead."""
    seq_length: int = 128
    """Tokens a sample."""

    def default_vocab(self) -> int | None:
        """Vocabulary of the data: 256 bytes, or whatever the model has for random tokens."""
        return BYTES if self.dataset == "text" else None

    def load(self, vocab_size: int, seed: int) -> tuple[Tokens, Tokens, dict[str, object]]:
        """Tokens to train on, tokens to validate on, and what the record says of them.

        Raises:
            ConfigError, DataError: flags that contradict each other; a text that is missing, empty or too short.
        """
        if self.dataset == "random":
            if self.text:
                raise ConfigError("--text and --dataset random contradict each other: leave one out")
            train = RandomTokens(vocab_size, self.seq_length, seed)
            about: dict[str, object] = {"source": f"uniform random tokens below {vocab_size}"}
            return train, RandomTokens(vocab_size, self.seq_length, seed + 1), {"dataset": "random", **about}
        if vocab_size < BYTES:
            raise ConfigError(f"--vocab_size {vocab_size}: text has {BYTES} different bytes; use at least {BYTES}")
        corpus: Corpus = read_text_files(self.text) if self.text else standard_library()
        validation = TextTokens(corpus.validation, self.seq_length, seed, shuffle=False)
        return TextTokens(corpus.train, self.seq_length, seed), validation, {"dataset": "text", **corpus.describe()}


def parse(config: type[T], doc: str | None = None) -> T:
    """The command line as a `config`. ``--help`` prints and leaves; so does a wrong flag, with the near miss and exit
    code 2. Either is printed once for the run.

    Raises:
        ConfigError: a flag whose value is empty, as of a shell's variable that is not set: a path would be the current
            folder.
    """
    for before, value in pairwise(["", *sys.argv[1:]]):
        flag = value[:-1] if value.startswith("--") and value.endswith("=") else before
        if flag.startswith("--") and value in ("", f"{flag}="):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave {flag} out")
    if breaks := getattr(config, "BREAKS", {}):
        doc = f"{doc}\n--break NAME makes a mistake:\n\n" + "\n".join(
            f"  {name}: {why}" for name, why in breaks.items()
        )
    program = shlex.join(command_line()[: -len(sys.argv[1:]) or None])
    with said_once():
        return tyro.cli(config, prog=program, description=doc, use_underscores=True)
