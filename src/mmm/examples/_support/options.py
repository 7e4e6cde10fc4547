"""The groups of flags that examples have of their own; `mmm.run.options` has the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import nn

from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.text_data import TextData
from mmm.data.text.tokens import BYTES, TextTokens
from mmm.errors import ConfigError
from mmm.models.llama.model import PRESETS, TransformerConfig
from mmm.optim.adamw import make_optimizer
from mmm.run.options import check_counts, check_rate

SMALL = ("debug", "small", "medium")  # presets


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor parallelism."""

    tpsize: Annotated[int, tyro.conf.arg(aliases=["--tp"])] = 1
    """Ranks along tp: over how many each matrix is sharded."""


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """The sizes of the Transformer: a preset, and what differs from it."""

    preset: Literal[
        "debug",
        "small",
        "reference",
        "medium",
        "shakespeare",
        "shakespeare-cpu",
        "gpt2",
        "llama-1b",
        "llama2-7b",
        "llama-8b",
        "llama-70b",
    ] = "small"
    """Sizes to start from; the flags below change single ones."""
    n_layers: int | None = None
    """Blocks. Default, as of the flags below: the preset's."""
    dim: int | None = None
    """Width of the residual stream."""
    n_heads: int | None = None
    """Heads of attention."""
    n_kv_heads: int | None = None
    """Heads of keys and values, which groups of the others share."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer. Default: the preset's, or of another --dim in proportion."""
    vocab_size: int | None = None
    """Tokens that there are. Default: those of the text: 256 bytes."""
    summary: bool = False
    """Print the model's summary and leave."""

    def sizes(self) -> TransformerConfig:
        """The sizes asked for.

        Raises:
            ConfigError: the preset has tied weights, which no example keeps one.
        """
        preset = PRESETS[self.preset]
        if preset.tie_word_embeddings:
            why = "has one weight for embedding and output, which this program does not keep one"
            raise ConfigError(f"--preset {self.preset} {why}: use mmm.trainer.lm, or another preset")
        asked: dict[str, Any] = {"vocab_size": BYTES}
        if self.dim is not None:
            asked["ffn_dim"] = None  # follows dim
        for name in ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
            if getattr(self, name) is not None:
                asked[name] = getattr(self, name)
        return replace(preset, **asked)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Routed experts, in place of feed-forward layers."""

    n_experts: int = 8
    """Experts in each layer."""
    top_k: int | None = None
    """Experts that each token goes through. Default: 2, or the only one."""
    expert_dim: int | None = None
    """Width of one expert. Default: that of the preset's feed-forward layer."""
    balance_rate: float = 0.01
    """How far a step moves the bias of an expert that had more, or less, than the mean load; 0: never. Runs of many
    thousand steps take less: 0.001."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        check_counts(n_experts=self.n_experts)
        if not 0 <= self.balance_rate < float("inf"):
            raise ConfigError(f"--balance_rate {self.balance_rate}: it must be a number from 0 on, and finite")

    def sizes(self) -> dict[str, Any]:
        """Fields of a model's sizes."""
        top_k = min(2, self.n_experts) if self.top_k is None else self.top_k
        return {"n_experts": self.n_experts, "top_k": top_k, "expert_dim": self.expert_dim}


@dataclass(frozen=True, kw_only=True)
class PlainTextOptions:
    """Where the text comes from. Files of tokens, and tokenizers: mmm.trainer.lm."""

    text: tuple[Path, ...] = ()
    """Files to train on, byte by byte. Default: the Python standard library's source."""
    seq_length: int = 128
    """Tokens a sample."""

    def load(self, vocab_size: int, seed: int) -> TextData:
        """The tokens.

        Raises:
            ConfigError: the vocabulary is too small.
            DataError: a text cannot be used.
        """
        if vocab_size < BYTES:
            raise ConfigError(f"--vocab_size {vocab_size}: text has {BYTES} different bytes; use at least {BYTES}")
        corpus: Corpus = read_text_files(self.text) if self.text else standard_library()
        train = TextTokens(corpus.train, self.seq_length, seed, shuffle=True)
        validation = TextTokens(corpus.validation, self.seq_length, seed, shuffle=False)
        return TextData(train, validation, {"dataset": "text", **corpus.describe()}, bytes_per_token=1.0)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How weights are updated."""

    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        check_rate(self.lr)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        return make_optimizer(self.optimizer, parameters, self.lr)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How often to evaluate on the validation text, and on how much of it."""

    eval_every: int = 50
    """Steps between two validations, one more at the end; 0: at the end alone."""
    eval_batches: int = 4
    """Global batches in a validation."""

    def check(self) -> None:
        """Raises ConfigError for a number that is too small."""
        check_counts(0, eval_every=self.eval_every)
        check_counts(eval_batches=self.eval_batches)
