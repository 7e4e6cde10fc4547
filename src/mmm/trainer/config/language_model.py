"""The flags of whatever a language model may have, of the weights that it starts from, and of samples of its text: the
groups ``model`` and ``sample``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError
from mmm.generate import checked, config_of
from mmm.models.rope import RopeScaling
from mmm.models.sampling import Sampling
from mmm.models.transformer import PRESETS, TransformerConfig
from mmm.outside import parse_json
from mmm.trainer.config.model import Preset, TransformerOptions, change_sizes
from mmm.trainer.config.run import check_counts, check_effect
from mmm.trainer.config.training import ExpertOptions
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import Weights

# Sizes that the weights decide. The others (epsilon, rotary positions) change no shape.
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "n_experts", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(TransformerOptions):
    """The model: a preset, or weights on disk, and what differs from them."""

    preset: Preset | None = None  # type: ignore[assignment]
    """Sizes to start from; the flags below change single ones. Default: small, or those of --init_from."""
    tie_word_embeddings: Annotated[bool, tyro.conf.arg(aliases=["--tie_embeddings"])] = False
    """The output matrix is the embedding's, also where the preset has two."""
    norm_eps: float | None = None
    """Added to the mean square that a norm divides by."""
    rope_theta: float | None = None
    """Base of the wavelengths of rotary positions."""
    rope_scaling: str | None = None
    """Scaling of rotary frequencies, as JSON with the names of Hugging Face's config.json: {"rope_type": "linear",
    "factor": 2.0}, or llama3 with all its numbers; {} for none where the preset has one."""
    init_from: Path | None = None
    """Start from these weights, in place of drawn ones: a folder of safetensors and config.json, a GGUF file, a
    checkpoint of `mmm import`, or a run's folder. Sizes are theirs, and so is the tokenizer where nothing else says."""

    def check(self) -> None:
        """Raises ConfigError: two flags that contradict each other."""
        if self.init_from is not None and self.preset is not None:
            raise ConfigError(
                f"--preset {self.preset} and --init_from {self.init_from} contradict each other: sizes are those of "
                "the weights; leave one out"
            )

    def weights(self) -> Weights | None:
        """The weights to start from.

        Raises:
            CheckpointError: there are none.
        """
        return None if self.init_from is None else open_weights(self.init_from.expanduser())

    def changed_sizes(self) -> dict[str, Any]:
        """As `TransformerOptions.changed_sizes`; a ConfigError for a scaling that is none."""
        changed = super().changed_sizes()
        changed |= {name: getattr(self, name) for name in ("norm_eps", "rope_theta") if getattr(self, name) is not None}
        if self.tie_word_embeddings:
            changed["tie_word_embeddings"] = True
        if self.rope_scaling is not None:
            try:
                changed["rope_scaling"] = RopeScaling.of(parse_json(self.rope_scaling))
            except ValueError as error:
                raise ConfigError(f"--rope_scaling {self.rope_scaling}: {error}") from None
        return changed

    def model_sizes(
        self, experts: ExpertOptions, weights: Weights | None, default_vocab: int | None = None
    ) -> TransformerConfig:
        """The sizes asked for.

        Args:
            weights: that the model starts from.
            default_vocab: as of `TransformerOptions.sizes`.

        Raises:
            ConfigError: a flag says other sizes than the weights have.
        """
        if weights is None:
            preset = PRESETS[self.preset or TransformerOptions.preset]
            return experts.add_to(change_sizes(preset, self.changed_sizes(), default_vocab))
        own = config_of(weights)
        sizes = experts.add_to(change_sizes(own, self.changed_sizes()))
        for name in SHAPES:
            if getattr(sizes, name) != getattr(own, name):
                there, asked = getattr(own, name), getattr(sizes, name)
                raise ConfigError(f"--init_from {self.init_from} has {name} {there}, and the flags say {asked}")
        return sizes


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The text that the model writes at each evaluation."""

    prompt: str | None = None
    """At each evaluation, have the model go on with this text; it is logged, and in the record."""
    sample_tokens: int | None = None
    """With --prompt, how many tokens. Default: 100."""
    sample_temperature: float | None = None
    """With --prompt, what the logits are divided by; 0: always the most probable token. Default: 1."""
    sample_top_k: int | None = None
    """With --prompt, only among so many of the most probable tokens. Default: all."""
    sample_top_p: float | None = None
    """With --prompt, only among the most probable tokens that have this probability together. Default: 1, all."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        given = {"sample_tokens": self.sample_tokens, "sample_temperature": self.sample_temperature}
        given |= {"sample_top_k": self.sample_top_k, "sample_top_p": self.sample_top_p}
        check_effect(self.prompt is not None, "--prompt", "no text is sampled", "--prompt with a text", **given)
        check_counts(sample_tokens=self.sample_tokens)
        self.sampling(seed=0)

    def sampling(self, seed: int) -> Sampling:
        """How a token is drawn."""
        given = {"temperature": self.sample_temperature, "top_k": self.sample_top_k, "top_p": self.sample_top_p}
        given = {name: value for name, value in given.items() if value is not None}
        return checked(Sampling(seed=seed, **given), "sample_")  # type: ignore[arg-type]


def text_ends(weights: Weights | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that begin a text, and those that end one: as the weights have them, but for a text of another
    tokenizer than theirs, whose tokens mean something else.

    Args:
        tokenizer: of the text; None where nobody knows.
    """
    if weights is None:
        return (), ()
    if tokenizer is not None and (own := weights.metadata.tokenizer) is not None and own[1] != tokenizer.content:
        return (), ()
    return weights.metadata.bos, weights.metadata.eos
