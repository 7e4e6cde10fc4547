"""Flags of a Transformer's sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from mmm.errors import ConfigError
from mmm.models.transformer import PRESETS, TransformerConfig
from mmm.trainer.config.options import EXPERTS, Need

Preset = Literal[
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
]


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
    TIES: ClassVar = False  # whether the program keeps tied weights one

    def base_config(self) -> TransformerConfig:
        """The sizes that flags change."""
        return PRESETS[self.preset]

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """The sizes asked for.

        Args:
            default_vocab: vocabulary of the data, where ``--vocab_size`` is not given; None for the preset's.
        """
        changed = {f.name: getattr(self, f.name) for f in fields(TransformerOptions) if f.name != "preset"}
        changed = {name: value for name, value in changed.items() if value is not None}
        if default_vocab is not None:
            changed.setdefault("vocab_size", default_vocab)
        preset = self.base_config()
        if "dim" in changed and "ffn_dim" not in changed:
            changed["ffn_dim"] = None  # follows dim
        if preset.tie_word_embeddings and not self.TIES:
            why = "has one weight for embedding and output, which this program does not keep one"
            raise ConfigError(f"--preset {self.preset} {why}: use mmm.trainer.lm, or another preset")
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
