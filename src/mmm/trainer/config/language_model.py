"""The flags of whatever a language model may have, of the weights that it starts from, and of samples of its text: the
groups ``model`` and ``sample``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError
from mmm.generate import config_of, end_of_answers
from mmm.models import gpt
from mmm.models.gpt import GPTConfig, LanguageConfig
from mmm.models.transformer import PRESETS
from mmm.trainer.config.model import Preset, TransformerOptions, change_sizes
from mmm.trainer.config.run import check_effect
from mmm.trainer.config.training import ExpertOptions
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import Weights

# Sizes that the weights decide. The others (epsilon, rotary positions) change no shape.
SHAPES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "n_experts", "tie_word_embeddings")
# Of a GPT; it takes these flags, and the others are a Transformer's.
GPT_SHAPES = ("dim", "n_layers", "n_heads", "vocab_size", "bias")
GPT_FLAGS = (*GPT_SHAPES, "dropout", "attention_dropout")


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(TransformerOptions):
    """The model: a preset, or weights on disk, and what differs from them."""

    model: Literal["transformer", "gpt"] | None = None
    """transformer: as Llama has it. gpt: as GPT-2 and nanoGPT have it, with learned positions for --seq_length tokens,
    and presets gpt2, shakespeare, shakespeare-cpu of its own. Default: transformer, or that of --init_from."""
    preset: Preset | None = None  # type: ignore[assignment]
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
        if self.tie_word_embeddings:
            changed["tie_word_embeddings"] = True
        return changed

    def model_sizes(
        self, experts: ExpertOptions, weights: Weights | None, seq_length: int, default_vocab: int | None = None
    ) -> LanguageConfig:
        """The sizes asked for.

        Args:
            weights: that the model starts from.
            seq_length: for which a GPT has positions, unless `weights` have more.
            default_vocab: as of `TransformerOptions.sizes`.

        Raises:
            ConfigError: a flag says other sizes than the weights have, or is of the other kind of model.
        """
        own = None if weights is None else config_of(weights)
        kind = self.model or ("gpt" if isinstance(own, GPTConfig) else "transformer")
        if own is not None and (kind == "gpt") != isinstance(own, GPTConfig):
            raise ConfigError(f"--model {kind} and --init_from {self.init_from}, which is no such model: leave one out")
        sizes: LanguageConfig
        shapes: tuple[str, ...]
        if kind == "gpt":
            sizes, shapes = self._gpt_sizes(experts, own, seq_length, default_vocab), GPT_SHAPES
        else:
            of_gpt = {"dropout": self.dropout, "attention_dropout": self.attention_dropout, "bias": self.bias or None}
            check_effect(False, "--model gpt", "a Transformer has none", "--model gpt", **of_gpt)
            assert not isinstance(own, GPTConfig)
            changed, drawn = self.changed_sizes(), PRESETS[self.preset or TransformerOptions.preset]
            sizes = experts.add_to(
                change_sizes(drawn, changed, default_vocab) if own is None else change_sizes(own, changed)
            )
            shapes = SHAPES
        for name in shapes if own is not None else ():
            if getattr(sizes, name) != getattr(own, name):
                there, asked = getattr(own, name), getattr(sizes, name)
                raise ConfigError(f"--init_from {self.init_from} has {name} {there}, and the flags say {asked}")
        return sizes

    def _gpt_sizes(
        self, experts: ExpertOptions, own: LanguageConfig | None, seq_length: int, default_vocab: int | None
    ) -> GPTConfig:
        preset = self.preset or "shakespeare-cpu"
        if preset not in gpt.PRESETS:
            raise ConfigError(f"--preset {preset} with --model gpt: its presets are {', '.join(gpt.PRESETS)}")
        given = {**self.changed_sizes(), **({"n_experts": experts.n_experts} if experts.n_experts else {})}
        if wrong := [name for name in given if name not in GPT_FLAGS]:
            raise ConfigError(
                f"--{wrong[0]} {given[wrong[0]]} with --model gpt, which has no such choice: leave it out"
            )
        own_flags = {"dropout": self.dropout, "attention_dropout": self.attention_dropout, "bias": self.bias or None}
        given |= {name: value for name, value in own_flags.items() if value is not None}
        if isinstance(own, GPTConfig):
            return replace(own, **given)
        drawn = {"block_size": seq_length} | ({} if default_vocab is None else {"vocab_size": default_vocab})
        return replace(gpt.PRESETS[preset], **{**drawn, **given})


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
