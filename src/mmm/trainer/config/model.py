"""The flags of a Transformer's sizes: the group ``model``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from mmm.errors import ConfigError
from mmm.models.llama.model import PRESETS, TransformerConfig

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
    """The sizes of the Transformer: a preset, and what differs from it."""

    preset: Preset = "small"
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
    """Tokens that there are. Default: those of the text's tokenizer."""

    def changed_sizes(self) -> dict[str, Any]:
        """What differs from the preset, of the fields of `TransformerConfig`."""
        names = ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def sizes(self, default_vocab: int | None = None) -> TransformerConfig:
        """The sizes asked for.

        Args:
            default_vocab: vocabulary of the data, where ``--vocab_size`` is not given; None for the preset's.

        Raises:
            ConfigError: the preset has tied weights, which no example keeps one.
        """
        preset = PRESETS[self.preset]
        if preset.tie_word_embeddings:
            why = "has one weight for embedding and output, which this program does not keep one"
            raise ConfigError(f"--preset {self.preset} {why}: use mmm.trainer.lm, or another preset")
        return change_sizes(preset, self.changed_sizes(), default_vocab)


@dataclass(frozen=True, kw_only=True)
class SmallTransformerOptions(TransformerOptions):
    """The sizes of a small Transformer: a preset, and what differs from it."""

    preset: Literal["debug", "small", "medium"] = "debug"


def change_sizes(
    sizes: TransformerConfig, changed: dict[str, Any], default_vocab: int | None = None
) -> TransformerConfig:
    """`sizes` with the fields `changed`; others follow from those.

    Args:
        default_vocab: as of `TransformerOptions.sizes`.
    """
    if default_vocab is not None:
        changed = {"vocab_size": default_vocab} | changed
    if "dim" in changed:
        changed = {"ffn_dim": None} | changed  # follows dim
    return replace(sizes, **changed)
