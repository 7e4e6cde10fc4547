"""The language model that flags ask for: its sizes, and what begins and ends a text."""

from __future__ import annotations

from typing import Any

from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.errors import ConfigError
from mmm.generate import config_of, end_of_answers
from mmm.models.definition import NAMES, ModelDef, find, of_config
from mmm.trainer.config import Model
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


def model_sizes(flags: Model, weights: Weights | None, seq_length: int, default_vocab: int | None = None) -> Any:
    """The sizes asked for.

    Args:
        weights: that the model starts from.
        seq_length: of a sample, in tokens.
        default_vocab: vocabulary of the data, where ``--vocab_size`` is not given; None for the preset's.

    Raises:
        ConfigError: a flag says other sizes than the weights have, or is of the other kind of model.
    """
    changed = flags.sizes()
    if weights is None:
        definition = find(flags.model or NAMES[0])
        check_language(definition)
        return definition.sizes(flags.preset, seq_length, **{"vocab_size": default_vocab, **changed})
    own = config_of(weights)
    definition = of_config(own)
    if flags.model not in (None, definition.name):
        raise ConfigError(
            f"--model {flags.model} and --init_from {flags.init_from}, which is no such model: leave one out"
        )
    sizes = definition.changed(own, **changed)
    for name in SHAPES:
        stored = getattr(own, name, None)
        asked = getattr(sizes, name, None)
        if asked != stored:
            raise ConfigError(f"--init_from {flags.init_from} has {name} {stored}, and the flags say {asked}")
    return sizes


def check_language(definition: ModelDef) -> None:
    """Raises ConfigError for a model that does not predict tokens."""
    if not definition.language:
        raise ConfigError(f"--model {definition.name}: it is no language model; {definition.program} trains it")


def text_ends(weights: Weights | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that begin a text, and those that end one: as the weights have them, but for a text of another
    tokenizer than theirs, whose tokens mean something else. Where nobody says what ends one: what ends an answer.

    Args:
        tokenizer: of the text; None where nobody knows.
    """
    of_answers = end_of_answers(tokenizer)
    if weights is None:
        return (), of_answers
    own = weights.metadata.tokenizer
    if tokenizer is not None and own is not None and own[1] != tokenizer.content:
        return (), of_answers
    return weights.metadata.bos, weights.metadata.eos or of_answers
