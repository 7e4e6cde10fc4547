"""Groups of flags that only examples have. `mmm.run.options` has the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import nn

from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.text_data import TextData
from mmm.data.text.tokens import BYTES, TextTokens
from mmm.errors import ConfigError
from mmm.models.llama.model import PRESETS, TransformerConfig
from mmm.optim.adamw import make_optimizer
from mmm.run.options import check_counts, check_rate

# Presets that train in seconds on a laptop.
SMALL = ("debug", "small", "medium")
if TYPE_CHECKING:
    PresetName = str
else:
    # A type checker takes no Literal that is computed.
    PresetName = Literal[tuple(PRESETS)]


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor parallelism."""

    tpsize: Annotated[int, "tp"] = 1
    """Number of ranks along tp, over which each matrix is sharded."""


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """The sizes of the Transformer: a preset, and sizes that differ from it."""

    preset: PresetName = "small"
    """Named sizes to start from. The flags below change single ones."""
    n_layers: int | None = None
    """Number of blocks. Default, as for the flags below: the preset's."""
    dim: int | None = None
    """Width of the residual stream."""
    n_heads: int | None = None
    """Number of attention heads."""
    n_kv_heads: int | None = None
    """Number of key/value heads. Each serves a group of query heads."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer. Default: the preset's, in proportion to --dim."""
    vocab_size: int | None = None
    """Number of different tokens. Default: that of a text, 256 bytes."""
    summary: bool = False
    """Print the model's summary and exit."""

    def sizes(self) -> TransformerConfig:
        """The sizes that the flags ask for.

        Raises:
            ConfigError: embedding and output of the preset share one weight, which no example shards as one.
        """
        preset = PRESETS[self.preset]
        if preset.tie_word_embeddings:
            raise ConfigError(
                f"--preset {self.preset} has one weight for embedding and output, which this program does not keep "
                "one: use mmm.trainer.lm, or another preset"
            )
        changes: dict[str, Any] = {"vocab_size": BYTES}
        if self.dim is not None:
            # None lets the width follow dim, unless --ffn_dim says something else.
            changes["ffn_dim"] = None
        for name in ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
            value = getattr(self, name)
            if value is not None:
                changes[name] = value
        return replace(preset, **changes)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Routed experts, which take the place of the feed-forward layers."""

    n_experts: int = 8
    """Number of experts in each layer."""
    top_k: int | None = None
    """Number of experts that each token goes through. Default: 2, or 1 if there is only one."""
    expert_dim: int | None = None
    """Width of one expert. Default: that of the preset's feed-forward layer."""
    balance_rate: float = 0.01
    """How far a step moves the bias of an expert whose load was above or below the mean; 0: never. Runs of many
    thousand steps take less, such as 0.001."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        check_counts(n_experts=self.n_experts)
        if not 0 <= self.balance_rate < float("inf"):
            raise ConfigError(f"--balance_rate {self.balance_rate}: it must be at least 0, and finite")

    def sizes(self) -> dict[str, Any]:
        """The fields of a `TransformerConfig` that are about experts."""
        top_k = self.top_k
        if top_k is None:
            top_k = min(2, self.n_experts)
        return {
            "n_experts": self.n_experts,
            "top_k": top_k,
            "expert_dim": self.expert_dim,
        }


@dataclass(frozen=True, kw_only=True)
class PlainTextOptions:
    """Where the text comes from. For files of tokens, and for tokenizers, see mmm.trainer.lm."""

    text: tuple[Path, ...] = ()
    """Files to train on, byte by byte. Default: the Python standard library's source."""
    seq_length: int = 128
    """Number of tokens in a sample."""

    def load(self, vocab_size: int, seed: int) -> TextData:
        """The tokens to train on, and those to validate on.

        Raises:
            ConfigError: the vocabulary is smaller than the number of different bytes.
            DataError: a text cannot be used.
        """
        if vocab_size < BYTES:
            raise ConfigError(f"--vocab_size {vocab_size}: text has {BYTES} different bytes; use at least {BYTES}")
        corpus: Corpus
        if self.text:
            corpus = read_text_files(self.text)
        else:
            corpus = standard_library()
        train = TextTokens(corpus.train, self.seq_length, seed, shuffle=True)
        validation = TextTokens(corpus.validation, self.seq_length, seed, shuffle=False)
        facts = {"dataset": "text", **corpus.describe()}
        # A token is a byte.
        return TextData(train, validation, facts, bytes_per_token=1.0)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How the optimizer updates the weights."""

    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        check_rate(self.lr)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer for these parameters."""
        return make_optimizer(self.optimizer, parameters, self.lr)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How often to evaluate on the validation text, and on how much of it."""

    eval_every: int = 50
    """Number of steps between two validations. There is one more at the end; 0: only that one."""
    eval_batches: int = 4
    """Number of global batches in a validation."""

    def check(self) -> None:
        """Raises ConfigError for a number that is too small."""
        check_counts(0, eval_every=self.eval_every)
        check_counts(eval_batches=self.eval_batches)
