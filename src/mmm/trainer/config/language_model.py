"""The flags of whatever a language model may have, of the weights that it starts from, and of samples of its text: the
groups ``model`` and ``sample``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError
from mmm.generate import config_of, end_of_answers
from mmm.models.definition import NAMES, ModelDef, find, of_config
from mmm.trainer.config.model import TransformerOptions
from mmm.trainer.config.training import ExpertOptions
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import Weights

# Sizes that the weights decide. The others (epsilon, rotary positions) change no shape.
SHAPES = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "hidden_dim",
    "n_experts",
    "tie_word_embeddings",
    "bias",
)


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(TransformerOptions):
    """The model: a preset, or weights on disk, and what differs from them."""

    model: str | None = None
    """llama: a Llama. gpt: as GPT-2 and nanoGPT have it, with learned positions for --seq_length tokens, and presets
    gpt2, shakespeare, shakespeare-cpu of its own. qwen3: a Qwen3, with presets debug, 0.6b, 4b, 8b. Default: llama, or
    that of --init_from."""
    preset: str | None = None  # type: ignore[assignment]
    """Sizes to start from; the flags below change single ones. Default: small, of a GPT shakespeare-cpu, or those of
    --init_from."""
    dropout: float | None = None
    """Of a GPT: the part of the embeddings, and of what blocks add to the residual stream, that training drops. Of a
    preset by default."""
    attention_dropout: float | None = None
    """Of a GPT: the part of attention's weights that training drops. Default: as --dropout."""
    bias: bool = False
    """Of a GPT: linear layers and norms have one."""
    tie_word_embeddings: Annotated[bool, tyro.conf.arg(aliases=["--tie_embeddings"])] = False
    """The output matrix is the embedding's, also where the preset has two."""
    init_from: Path | None = None
    """Start from these weights, in place of drawn ones: a folder of safetensors and config.json, a checkpoint
    of `mmm import`, or a run's folder. Sizes are theirs, and so is the tokenizer where nothing else says."""

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
        """As `TransformerOptions.changed_sizes`."""
        changed = super().changed_sizes()
        changed["dropout"] = self.dropout
        changed["attention_dropout"] = self.attention_dropout
        changed["bias"] = self.bias or None
        changed["tie_word_embeddings"] = self.tie_word_embeddings or None
        return {name: value for name, value in changed.items() if value is not None}

    def model_sizes(
        self, experts: ExpertOptions, weights: Weights | None, seq_length: int, default_vocab: int | None = None
    ) -> Any:
        """The sizes asked for.

        Args:
            weights: that the model starts from.
            seq_length: for which a GPT has positions, unless `weights` have more.
            default_vocab: as of `TransformerOptions.sizes`.

        Raises:
            ConfigError: a flag says other sizes than the weights have, or is of the other kind of model.
        """
        changed = self.changed_sizes() | experts.sizes()
        if weights is None:
            definition = find(self.model or NAMES[0])
            check_language(definition)
            return definition.sizes(self.preset, seq_length, **{"vocab_size": default_vocab, **changed})
        own = config_of(weights)
        definition = of_config(own)
        if self.model not in (None, definition.name):
            raise ConfigError(
                f"--model {self.model} and --init_from {self.init_from}, which is no such model: leave one out"
            )
        sizes = definition.changed(own, **changed)
        for name in SHAPES:
            stored = getattr(own, name, None)
            asked = getattr(sizes, name, None)
            if asked != stored:
                raise ConfigError(f"--init_from {self.init_from} has {name} {stored}, and the flags say {asked}")
        return sizes


def check_language(definition: ModelDef) -> None:
    """Raises ConfigError for a model that does not predict tokens."""
    if not definition.language:
        raise ConfigError(f"--model {definition.name}: it is no language model; {definition.program} trains it")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The text that the model writes at each evaluation."""

    prompt: str | None = None
    """At each evaluation, have the model go on with this text, for 100 tokens; they are logged, and in the record."""


def text_ends(weights: Weights | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that begin a text, and those that end one: as the weights have them, but for a text of another
    tokenizer than theirs, whose tokens mean something else. Where nobody says what ends one: what ends an answer.

    Args:
        tokenizer: of the text; None where nobody knows.
    """
    of_answers = end_of_answers(tokenizer)
    if weights is None:
        return (), of_answers
    if tokenizer is not None and (own := weights.metadata.tokenizer) is not None and own[1] != tokenizer.content:
        return (), of_answers
    return weights.metadata.bos, weights.metadata.eos or of_answers
