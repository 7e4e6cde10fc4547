"""The language model that flags ask for: its sizes."""

from __future__ import annotations

from typing import Any

from mmm.errors import ConfigError
from mmm.models.definition import NAMES, ModelDef, find, of_config
from mmm.trainer.config import Model
from mmm.weights.weights import Weights, config_of

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


def model_sizes(
    flags: Model,
    weights: Weights | None,
    seq_length: int,
    default_vocab: int | None = None,
) -> Any:
    """The sizes that the flags ask for.

    Args:
        flags: the group ``model`` of the flags.
        weights: weights that the model starts from. None if they are drawn.
        seq_length: tokens of a sample.
        default_vocab: vocabulary of the data, if ``--vocab_size`` is not given; None for the preset's.

    Raises:
        ConfigError: a flag contradicts the sizes of the weights, or belongs to the other kind of model.
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
    # Flags may change a model that is on disk, but none of the shapes of its tensors.
    for name in SHAPES:
        stored = getattr(own, name, None)
        asked = getattr(sizes, name, None)
        if asked != stored:
            raise ConfigError(f"--init_from {flags.init_from} has {name} {stored}, and the flags say {asked}")
    return sizes


def check_language(definition: ModelDef) -> None:
    """Raises ConfigError for a model that does not predict tokens."""
    if not definition.language:
        raise ConfigError(f"--model {definition.name}: it is not a language model; {definition.program} trains it")
