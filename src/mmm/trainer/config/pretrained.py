"""The flags of where a model's sizes and first weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError
from mmm.generate.weights import config_of, tokenizer_on_disk
from mmm.models.transformer import PRESETS, TransformerConfig
from mmm.trainer.config.text import ModelOptions
from mmm.trainer.config.transformer_options import Preset, TransformerOptions
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import Weights

# Sizes that the weights decide. The others (epsilon, rotary positions) change no shape.
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "n_experts", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class PretrainedOptions(ModelOptions):
    """Where a model's sizes and first weights come from."""

    preset: Preset | None = None  # type: ignore[assignment]
    """Sizes to start from; the flags below change single ones. Default: small, or those of --init_from."""
    init_from: Path | None = None
    """Start from these weights, in place of drawn ones: a folder of safetensors and config.json, a GGUF file, a
    checkpoint of `mmm import`, or a run's folder. Sizes are theirs, and so is the tokenizer where nothing else says."""

    def weights(self) -> Weights | None:
        """The weights to start from, opened once.

        Raises:
            CheckpointError: there are none.
        """
        if self.init_from is None:
            return None
        if (opened := vars(self).get("_weights")) is None:
            opened = open_weights(self.init_from.expanduser())
            object.__setattr__(self, "_weights", opened)  # no field: no flag, and no part of the record
        return opened

    def base_config(self) -> TransformerConfig:
        weights = self.weights()
        if weights is None:
            return PRESETS[self.preset or TransformerOptions.preset]
        if self.preset is not None:
            raise ConfigError(
                f"--preset {self.preset} and --init_from {self.init_from} contradict each other: sizes are those of "
                "the weights; leave one out"
            )
        return config_of(weights)

    def model_config(self, default_vocab: int | None = None) -> TransformerConfig:
        """As `ModelOptions.model_config`; a ConfigError also where a flag says other sizes than the weights have."""
        config = super().model_config(default_vocab if self.init_from is None else None)
        if self.init_from is not None:
            own = self.base_config()
            for name in SHAPES:
                if getattr(config, name) != getattr(own, name):
                    there, asked = getattr(own, name), getattr(config, name)
                    raise ConfigError(f"--init_from {self.init_from} has {name} {there}, and the flags say {asked}")
        return config

    def default_tokenizer(self) -> Tokenizer | None:
        weights = self.weights()
        return None if weights is None else tokenizer_on_disk(weights.metadata)

    def text_ends(self, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that begin a text, and those that end one: as the weights have them, but for a text of another
        tokenizer than theirs, whose tokens mean something else.

        Args:
            tokenizer: of the text; None where nobody knows.
        """
        weights = self.weights()
        if weights is None:
            return (), ()
        if tokenizer is not None and (own := weights.metadata.tokenizer) is not None and own[1] != tokenizer.content:
            return (), ()
        return weights.metadata.bos, weights.metadata.eos
